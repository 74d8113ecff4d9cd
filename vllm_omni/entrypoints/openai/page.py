"""``GET /omni``: a page to talk to the model, and to see what its stages do."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.api_keys import PAGE_FILES
from vllm_omni.entrypoints.openai.schema import answers
from vllm_omni.entrypoints.page.files import HEADERS, INDEX, PageFile, page_files
from vllm_omni.entrypoints.page.model import describe_model
from vllm_omni.entrypoints.page.state import read_state
from vllm_omni.errors import UnknownFile
from vllm_omni.names import suggest

PAGE = "/omni"
OPEN, GUARDED = b'data-key="open"', b'data-key="required"'
"""In the document: whether to ask for a key before the first request."""

page_router = APIRouter()


@page_router.get(PAGE, include_in_schema=False)
async def page(raw_request: Request) -> Response:
    """The page itself, which has nothing of the model: it asks the other routes, with a key if they need one."""
    document = page_files()[INDEX]
    if raw_request.app.state.needs_key:
        document = document._replace(content=document.content.replace(OPEN, GUARDED))
    return _send(document)


@page_router.get(f"{PAGE_FILES}{{name}}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """A script, a style or a picture of the page."""
    if name not in page_files():
        raise UnknownFile(f"no file {name!r} of the page: {suggest(name, page_files())}")
    return _send(page_files()[name])


@page_router.get(f"{PAGE}/model", responses=answers())
async def model(raw_request: Request) -> JSONResponse:
    """The served graphs, the parameters of their stages, and what they read and answer."""
    omni: AsyncOmni = raw_request.app.state.engine_client
    return JSONResponse(describe_model(omni, raw_request.app.state.served_names))


@page_router.get(f"{PAGE}/state", responses=answers())
async def state(raw_request: Request) -> JSONResponse:
    """The load, the speed and the memory of each engine now; counters are totals since the server's start."""
    omni: AsyncOmni = raw_request.app.state.engine_client
    return JSONResponse(await read_state(omni.orchestrator))


def _send(file: PageFile) -> Response:
    return Response(file.content, headers=HEADERS, media_type=file.media_type)
