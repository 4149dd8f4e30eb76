"""Checks of the exercises: they print "Correct: ..." or "Not yet: ...", and never raise.

    from notebooks.checks import lesson02 as check
    check.damaged(answer)        # prints the verdict

A module per lesson holds the lesson's checks. Each is a function under `core.exercise` that calls `require(condition,
*sentences)`, or one of the comparisons of `compare`, where an answer may be wrong, and returns a sentence for a right
one; `gpus` has what checks ask of the machine. A sentence names the value seen, says why it is wrong, and what to do. A
check measures (it calls the learner's function on fresh inputs, it reads torch.cuda); it never reads code. Whatever an
answer does, `exercise` makes a sentence of it: checks need no guards of their own.
"""
