"""A TCP proxy whose address stays while what is behind it dies, moves or stands still."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards connections to `upstream`; between two S3 ends it is invisible.

    Attributes:
        upstream: (host, port) new connections go to; None: they are closed at once.
        flowing: cleared, nothing is forwarded, on old connections neither; set at first.
    """

    def __init__(self, upstream: tuple[str, int] | None = None) -> None:
        self.upstream = upstream
        self.flowing = threading.Event()
        self.flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._over = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self.flowing.set()
        self.cut()
        with contextlib.suppress(OSError):  # wakes accept()
            socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join()
        self._listener.close()

    def cut(self) -> None:
        """Breaks every open connection."""
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._over:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as ends:
            ends.enter_context(client)
            upstream = self.upstream
            if upstream is None or self._over:
                return
            with contextlib.suppress(OSError):
                server = ends.enter_context(socket.create_connection(upstream))
                pair = {client, server}
                with self._lock:
                    self._open |= pair
                back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
                back.start()
                self._copy(client, server)
                back.join()
                with self._lock:
                    self._open -= pair

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.flowing.wait()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
