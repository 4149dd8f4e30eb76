"""Checks of the exercises: they say "correct" or "not yet, because", and never raise.

A lesson imports its own module:

    from helpers.exercises import lesson02 as check
    check.imbalance(answer)      # prints "not yet: ..., because ..." or "correct: ..."

A module per lesson holds the lesson's checks, each a function under `@exercise` (`core`), written with the
comparisons of `compare`. To write one:

    from helpers.exercises.core import exercise
    from helpers.exercises import compare

    @exercise
    def parameters(answer):
        compare.number(answer, 24_253_410, unit="parameters", mistakes={97_013_640: "those are the bytes"})
        return "and four bytes each make 92.5 MiB"

A check measures (it calls the learner's function on fresh inputs, it reads torch.cuda); it never reads code. `gpus` has
what checks ask of the GPUs before they use them.
"""
