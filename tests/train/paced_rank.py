"""A rank of the elastic run: torchrun paced_rank.py FOLDER OPTIONS. It trains as `fusedtp train` does, but waits

before step 6 on four ranks     until FOLDER/killed exists: meanwhile a node is killed
in step 10 on two ranks         until torchrun asks it to end, because the node is back
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

from fusedtp import cli
from fusedtp.train.loop import learning_rate


def paced(options, step):
    if step == 6 and os.environ["WORLD_SIZE"] == "4":
        while not Path(sys.argv[1], "killed").exists():
            time.sleep(0.02)
    if step == 10 and os.environ["WORLD_SIZE"] == "2":
        heard, before = [], signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: (before(*given), heard.append(1)))
        while not heard:
            time.sleep(0.02)
    return learning_rate(options, step)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)  # on a hang, print where
    with patch("fusedtp.commands.run.learning_rate", paced):
        sys.exit(cli.main(["train", *sys.argv[2:]]))
