"""SSH server for tests on machines without sshd: `python ssh_server.py ADDRESS PORT FOLDER`.

The server runs commands through `sh -c`, as sshd does without a terminal. When a connection ends, the server only
closes the pipes of its processes and does not kill them. FOLDER holds the server's key and the clients' keys.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import asyncssh


async def serve(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Run one command of one client."""
    client, server = process.get_extra_info("peername"), process.get_extra_info("sockname")
    names = ("HOME", "PATH", "USER", "LANG")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment["SSH_CONNECTION"] = f"{client[0]} {client[1]} {server[0]} {server[1]}"
    pipe = subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        "sh", "-c", process.command or "exit 2", stdin=pipe, stdout=pipe, stderr=pipe, env=environment
    )
    await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
    status = await child.wait()
    await process.stdout.drain()
    if status >= 0:
        process.exit(status)
    else:
        process.exit_with_signal("KILL" if status == -9 else "TERM")


async def main(address: str, port: int, folder: Path) -> None:
    """Serve until killed."""
    await asyncssh.listen(
        address,
        port,
        server_host_keys=[str(folder / "host_key")],
        authorized_client_keys=str(folder / "client_key.pub"),
        process_factory=serve,
        encoding=None,
    )
    (folder / f"listens.{address}").touch()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
