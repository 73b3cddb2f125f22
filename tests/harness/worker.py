"""One rank of a world, in a process of its own.

It joins a gloo group through the driver's store, then answers the driver's calls on a socket until that closes.
"""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from tests.harness.messages import Failure, PerRank


def main(rank: int, size: int, port: int, fd: int) -> None:
    """Join the world through the store on `port` and serve it on the socket `fd`; does not return."""
    faulthandler.enable()  # a worker that dies of a signal prints its stack
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_die_with_the_driver, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    share_device()
    connection = Connection(fd)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    connection.send_bytes(b"ready")
    _serve(connection, rank)
    sys.stderr.flush()
    os._exit(0)  # threads of a failed call must not keep the process alive


def share_device() -> None:
    """Let one gloo thread move the data of all groups of this process.

    By default a group has its own device, whose thread wakes up a hundred times per second while the group lives.
    """
    gloo = dist.ProcessGroupGloo
    name, plain = os.environ.get("GLOO_SOCKET_IFNAME"), gloo.__init__
    device = gloo.create_device(interface=name) if name else gloo.create_default_device()

    def init(self, store, rank, size, timeout, enable_reconfigure=False):  # the last argument is new in torch 2.14
        assert not enable_reconfigure
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        plain(self, store, rank, size, options)

    gloo.__init__ = init


def _serve(connection: Connection, rank: int) -> None:
    shared = None
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        start = time.monotonic()
        try:
            own, function, arguments = pickle.loads(message)
            if shared is None and not own:
                shared = dist.new_group()
            mine = [a.values[rank] if isinstance(a, PerRank) else a for a in arguments]
            answer = pickle.dumps(_call(function, mine, None if own else shared))
        except BaseException as error:
            answer = pickle.dumps(Failure.of(error, time.monotonic() - start))
            del error
            gc.collect()
        connection.send_bytes(answer)


def _call(function, arguments, group):
    torch.manual_seed(0)  # random weights are the same on all ranks, whatever ran in them before
    if group is not None:
        return function(group, *arguments)
    group = dist.new_group()
    try:
        return function(group, *arguments)
    finally:
        dist.destroy_process_group(group)


def _die_with_the_driver(driver: int) -> None:
    while os.getppid() == driver:
        time.sleep(0.5)
    os._exit(1)
