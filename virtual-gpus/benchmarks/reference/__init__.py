"""What a real GPU was measured with: training steps, single operators, and what it answered (tests/data/h200).

networks: the networks of the training steps.  cases: the measured training steps.  operators: the measured operators.
further: more networks, for cards to come.  measure: measures any of them, on virtual GPUs or on real ones.
"""
