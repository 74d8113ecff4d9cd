"""A collector of OpenTelemetry in this process: a real gRPC server, which keeps the spans that it is sent."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Collector(TraceServiceServicer):
    """Attributes:
    url: to which spans are sent.
    """

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Any] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans += scope.spans
        return ExportTraceServiceResponse()

    def spans(self, trace_id: str) -> list[Any]:
        """The spans of a trace, given in hexadecimal digits."""
        with self._lock:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]


@contextmanager
def collector() -> Iterator[Collector]:
    service, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(service, server)
    service.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield service
    finally:
        server.stop(1).wait()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
