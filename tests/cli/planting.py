"""Scripts that fail by a planted fault, and interpreters in which they start at once.

`PLANTED` in the environment, ``{"qwen3.Qwen3MLP": "raise"}``, says which replacements go wrong and how. As
`sitecustomize`, this module plants them; with the name of a socket it is a server in which torch is imported already
and that forks for each program; with a socket and a program, the program as it is run there.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any


def wrong(replacement: Any, how: str) -> Any:
    """`replacement`, with a result that is wrong: "raise", "nan", or a factor."""

    @functools.wraps(replacement)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if how == "raise":
            raise RuntimeError("planted")
        result = replacement(*arguments, **keywords)
        if isinstance(result, tuple):
            return (result[0] * float(how), *result[1:])
        return result * float(how)

    return call


def plant(patcher: Any) -> None:
    """Have each site named in PLANTED get a replacement that is wrong."""
    decide = patcher._decide

    def planted(site: Any, *others: Any) -> Any:
        row, outcome = decide(site, *others)
        how = json.loads(os.environ.get("PLANTED", "{}")).get(site.name)
        if how and isinstance(outcome, tuple):
            outcome = wrong(outcome[0], how), outcome[1]
        return row, outcome

    patcher._decide = planted


def serve(path: str) -> None:
    """Fork for each program that is sent; in the fork, start as an interpreter with the hook does."""
    import transformers.modeling_utils  # noqa: F401

    assert "npu_autopatch.patcher" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            client, _ = server.accept()
            if os.fork() == 0:
                server.close()
                answer(client)
            client.close()


def answer(client: socket.socket) -> None:
    """Run the program in a process of its own, and say which and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order, files, _, _ = socket.recv_fds(client, 1 << 20, 1)
    if (child := os.fork()) == 0:
        program = json.loads(order)
        os.chdir(program["folder"])
        os.environ.clear()
        os.environ.update(program["environment"])
        for number in (1, 2):
            os.dup2(files[0], number)
        sys.argv = program["argv"]
        start()
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    client.sendall(b"%d\n" % child)
    client.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def start() -> None:
    """What the hook does when an interpreter starts, and then when what loads remote code is imported."""
    import _npu_autopatch_boot

    _npu_autopatch_boot.init()
    if "npu_autopatch.finder" in sys.modules:
        from npu_autopatch.finder import REMOTE_CODE_LOADER
        from npu_autopatch.loader import loaded

        loaded(sys.modules[REMOTE_CODE_LOADER])


def be(path: str, argv: list[str]) -> int:
    """Send the program, pass on Ctrl-C, and end as it does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        order = json.dumps({"argv": argv, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
        socket.send_fds(server, [order], [1])
        with server.makefile() as answers:
            child = int(next(answers))
            signal.signal(signal.SIGINT, lambda *_: os.kill(child, signal.SIGINT))
            return int(next(answers))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(be(sys.argv[1], sys.argv[2:]))
else:
    import wrapt

    wrapt.register_post_import_hook(plant, "npu_autopatch.patcher")
