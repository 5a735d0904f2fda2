"""The router as an ASGI application: composition, health, models; nothing global."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from services.router.auth import BEARER, Auth
from services.router.body import BodyLimit
from services.router.edge import Edge
from services.router.generation import TextGenerator
from services.router.lease import PairSource
from services.router.metering import RouterMetrics
from services.router.openai.chat import chat_routes
from services.router.openai.completions import completions_routes
from services.router.openai.errors import (
    ANSWERS,
    ModelNotFound,
    on_bug,
    on_http_error,
    on_sluice_error,
    on_validation_error,
)
from services.router.openai.intake import Intake, Limits
from services.router.openai.prompts import Prompts
from services.router.openai.schema import Model, ModelList
from services.router.openai.tokens import token_routes
from services.router.page.routes import page_routes
from services.router.recorder import Recorder
from services.router.settings import RouterSettings
from sluice.apikeys import ApiKeys
from sluice.errors import SluiceError
from sluice.telemetry.tracing import Tracing
from sluice.text.chat import ChatTemplate
from sluice.text.reply.formats import choose_format
from sluice.text.tokenizer import ModelTokenizer


class Health(BaseModel):
    status: str = "ok"


class PairBody(BaseModel):
    decode: str
    prefill: str


class Ready(BaseModel):
    """``reasons`` names every pod that can't serve and why, also when others can."""

    ready: bool
    pairs: list[PairBody]
    reasons: list[str]


def create_app(
    settings: RouterSettings,
    tokenizer: ModelTokenizer,
    pairing: PairSource,
    template: ChatTemplate | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application; ``pairing`` is started and stopped with it. No ``template``, no chat."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pairing.start()
        try:
            yield
        finally:
            await pairing.stop()

    metrics = RouterMetrics()
    recorder = Recorder(metrics)
    metrics.watch(pairing.view, lambda: recorder.num_running)
    app = FastAPI(title="Sluice router", lifespan=lifespan)
    # The last one added is met first: an id for every answer, then who asks, then what they send.
    app.add_middleware(
        BodyLimit, max_body_bytes=settings.max_body_bytes, body_timeout_s=settings.body_timeout_s
    )
    if settings.api_keys_file is not None:
        app.add_middleware(Auth, keys=ApiKeys(settings.api_keys_file))
    app.add_middleware(Edge, observe=metrics.http)
    app.add_exception_handler(SluiceError, on_sluice_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    format_ = choose_format(settings.model_dir, template, settings.tool_format, settings.reasoning)
    intake = Intake(
        Prompts(settings.served_name, tokenizer, template, format_),
        pairing.max_model_tokens,
        Limits(settings.timeout_s, settings.max_timeout_s, settings.max_prompts),
    )
    generator = TextGenerator(pairing, tokenizer, settings.retries, recorder, tracing or Tracing())
    keyed = [] if settings.api_keys_file is None else [BEARER]
    for routes in (
        completions_routes(intake, generator),
        chat_routes(intake, generator),
        token_routes(intake),
        _model_routes(settings.served_name, pairing),
    ):
        app.include_router(routes, dependencies=keyed)
    app.include_router(_health_routes(pairing))
    app.include_router(page_routes(settings.served_name, pairing.view, recorder))
    return app


def _health_routes(pairing: PairSource) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Health:
        """This process is alive; says nothing about the pods."""
        return Health()

    @routes.get("/ready", responses={200: {"model": Ready}, 503: {"model": Ready}})
    async def ready() -> JSONResponse:
        """A pair can serve; 503 with reasons otherwise."""
        seen = pairing.readiness()
        if pairing.draining:
            body = Ready(ready=False, pairs=[], reasons=["the router is shutting down"])
            return JSONResponse(body.model_dump(), 503)
        pairs = [PairBody(decode=pair.decode, prefill=pair.prefill) for pair in seen.pairs]
        body = Ready(ready=bool(pairs), pairs=pairs, reasons=list(seen.reasons))
        return JSONResponse(body.model_dump(), 200 if pairs else 503)

    return routes


def _model_routes(name: str, pairing: PairSource) -> APIRouter:
    routes = APIRouter()
    created = int(time.time())

    def model() -> Model:
        return Model(id=name, created=created, max_model_len=pairing.max_model_tokens() or None)

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[model()])

    @routes.get("/v1/models/{model_id:path}", responses=ANSWERS)
    async def get_model(model_id: str = Path(examples=[name])) -> Model:
        if model_id != name:
            raise ModelNotFound(f"the model {model_id!r} does not exist", field="model")
        return model()

    return routes
