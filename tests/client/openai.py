"""The engine's routes, as far as a client sees them: it answers what it is told to, in pieces or whole, or refuses."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """Answers with `pieces`; `requests` are the bodies that came, `headers` what came with them, `connections` (the
    client's address) by which; `refusal` is answered with status 400; `cut` ends the connection in the middle; `left`
    is set when the reader has gone."""

    def __init__(self) -> None:
        self.pieces = ["Down", " to", " the sea."]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections: list[object] = []
        self.refusal: str | None = None
        self.cut = False
        self.pause_s = 0.0
        self.left = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                outer.connections.append(self.client_address)
                if outer.refusal is not None:
                    self._whole({"object": "error", "message": outer.refusal}, 400)
                    return
                if not outer.requests[-1].get("stream"):
                    self._whole(self._answer())
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    self._stream()
                except OSError:
                    outer.left.set()
                self.close_connection = True

            def _answer(self) -> dict[str, Any]:
                if self.path.endswith("_lora_adapter"):
                    return {"success": True}
                text = "".join(outer.pieces)
                said = {"text": text} if self.path == "/v1/completions" else {"message": {"content": text}}
                return {"id": "1", "created": 1, "model": "small", "choices": [{"index": 0, **said}]}

            def _whole(self, body: dict[str, Any], status: int = 200) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self) -> None:
                for piece in outer.pieces:
                    self._send({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})
                    time.sleep(outer.pause_s)
                if outer.cut:
                    self.wfile.flush()
                    self.connection.shutdown(2)
                    return
                self._send({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]})
                self._send({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(outer.pieces)}})
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")

            def _send(self, event: dict[str, Any]) -> None:
                self._chunk(f"data: {json.dumps(event)}\n\n".encode())

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
