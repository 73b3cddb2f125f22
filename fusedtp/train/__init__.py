"""The thin trainer behind `fusedtp train`.

    launch    command line -> checks -> torchrun -> one run a rank
    run       build, train, verify, sample, report
    loop      what happens in a step

Each other file is one idea that these use.
"""
