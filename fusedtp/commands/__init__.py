"""Subcommands of `fusedtp` that run training and work with its outputs.

    launch    train, finetune: command line -> validation -> torchrun -> one process per rank
    elastic   adapts the mesh to the available ranks
    build     builds the model of a configuration on a rank
    run       a whole run on one rank: build, resume, train, verify, sample
    verify    --verify: repeats the first steps in one plain process
    results   the outputs of a run: metrics, events, plots, the screen, the summary
    runs      checkpoints, generate: commands for saved runs
    report    a run as one HTML page

The loop and everything in it is fusedtp.train.
"""
