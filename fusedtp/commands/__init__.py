"""Subcommands of `fusedtp` that make a training run and work with what it leaves.

    launch    train, finetune, warmup: command line -> checks -> torchrun -> one run a rank
    elastic   how the mesh follows the ranks that are there
    build     the model of a configuration, on a rank
    run       a whole run on one rank: build, resume, train, verify, sample
    verify    --verify: the first steps again in one plain process
    results   what a run leaves: metrics, events, plots, the screen, the summary
    runs      checkpoints, generate: what can be done with a run that was saved
    report    a run as one HTML page

The loop and everything in it is fusedtp.train.
"""
