"""The lab: real Megatron-core on CPU over gloo, and a catalogue of faults that users reported.

`catalog` says what there is (without torch), `launch` starts it, `worker` is one process of it,
`model` builds the training run, `faults` holds the mechanisms, `cpu` and `te` the doubles for CUDA.
"""
