"""The engine's side of the link and of the adapter routes, spoken over a real socket and real HTTP."""

from __future__ import annotations

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from core.link.messages import EngineNotice, Goodbye, Hello, JobUpdate, Learnt, PlanView, Stopping, Telemetry, ToEngine
from core.link.transport import EngineEnd

M = TypeVar("M")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class EnginePeer:
    """An engine that does what a test tells it to."""

    def __init__(self, url: str, engine_id: str = "engine-1", http_url: str = "http://127.0.0.1:1") -> None:
        self.engine_id = engine_id
        self.http_url = http_url
        self._end = EngineEnd(url, engine_id)
        self._closed = False

    def hello(self, **fields: Any) -> None:
        base: dict[str, Any] = {
            "engine_id": self.engine_id,
            "pid": os.getpid(),
            "http_url": self.http_url,
            "model": "small",
            "model_path": os.devnull,
            "device": "cpu",
            "device_name": "a CPU",
            "dtype": "float32",
            "parameters": 1000,
            "versions": {"sglang": "0.5.16"},
            "max_lora_rank": 16,
            "lora_modules": MODULES,
            "kv_tokens": 4096,
            "max_running_requests": 4,
            "partitions": ("whole",),
            "solo_itl_ms": 13.4,
        }
        self._end.send(Hello(**{**base, **fields}))

    def telemetry(self, **fields: Any) -> None:
        base: dict[str, Any] = {
            "engine_id": self.engine_id,
            "time": time.time(),
            "interval_s": 0.5,
            "plan": PlanView(policy="tasklet_slices"),
        }
        self._end.send(Telemetry(**{**base, **fields}))

    def update(self, job_id: str, token: int, kind: Any, **fields: Any) -> None:
        time_ = fields.pop("time", time.time())
        self._end.send(JobUpdate(engine_id=self.engine_id, job_id=job_id, token=token, time=time_, kind=kind, **fields))

    def notice(self, code: str, message: str) -> None:
        self._end.send(
            EngineNotice(engine_id=self.engine_id, time=time.time(), level="warning", code=code, message=message)
        )

    def stopping(self) -> None:
        self._end.send(Stopping(engine_id=self.engine_id))

    def learnt(self, **fields: Any) -> None:
        self._end.send(Learnt(engine_id=self.engine_id, time=time.time(), **fields))

    def goodbye(self) -> None:
        self._end.send(Goodbye(engine_id=self.engine_id))

    def reconnected(self) -> bool:
        return self._end.reconnected()

    def expect(self, kind: type[M], timeout_s: float = 30.0) -> M:
        """The next message of a kind; others that come before it are read past."""
        deadline = time.monotonic() + timeout_s
        seen: list[ToEngine] = []
        while (left := deadline - time.monotonic()) > 0:
            message = self._end.receive(max(int(left * 1000), 1))
            if isinstance(message, kind):
                return message
            if message is not None:
                seen.append(message)
        raise AssertionError(f"no {kind.__name__} came within {timeout_s} s, but {seen}")

    def nothing(self, kind: type[Any], timeout_s: float = 0.7) -> None:
        """Fails when a message of the kind comes."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self._end.receive(max(int(left * 1000), 1))
            assert not isinstance(message, kind), message

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end.close()


class AdapterServer:
    """The engine's two adapter routes. Loading waits while `held` is set. Under a name that is taken it exchanges the
    two: `loaded` has the new one, and the old one is `draining` while `in_use` is set; that is also as long as
    unloading waits. `refuse` and `refuse_unload` say why it does not. Asked in a chat, an adapter says from which
    folder it was loaded."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.draining: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.in_use = threading.Event()
        self.held = threading.Event()
        self.refuse: str | None = None
        self.refuse_unload: str | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = outer._answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                data = json.dumps({"data": [{"id": "small"}, *({"id": name} for name in outer.loaded)]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/chat/completions":
            loaded = self.loaded.get(body["model"].partition(":")[2])
            if loaded is None:
                return 404, {"error": {"message": f"model {body['model']} is not served here"}}
            text = f"{body['messages'][0]['content']} {loaded}"
            usage = {"completion_tokens": body["max_tokens"]}
            return 200, {"choices": [{"message": {"content": text}}], "usage": usage}
        name = body["lora_name"]
        self.calls.append((path, name))
        if path == "/load_lora_adapter":
            if self.refuse is not None:
                return 400, {"success": False, "error_message": self.refuse}
            while self.held.is_set():
                time.sleep(0.02)
            if name in self.loaded:
                self.draining.append(self.loaded[name])
                threading.Thread(target=self._drain, args=(self.loaded[name],), daemon=True).start()
            self.loaded[name] = body["lora_path"]
            return 200, {"success": True}
        refused = self.refuse_unload if name in self.loaded else f"LoRA with name {name} does not exist."
        if refused is not None:
            return 400, {"success": False, "error_message": refused}
        while self.in_use.is_set():
            time.sleep(0.02)
        self.loaded.pop(name, None)
        return 200, {"success": True}

    def _drain(self, path: str) -> None:
        while self.in_use.is_set():
            time.sleep(0.02)
        self.draining.remove(path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
