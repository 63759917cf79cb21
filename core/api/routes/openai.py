"""The routes under /v1, for OpenAI's clients."""

from __future__ import annotations

from fastapi import APIRouter

from core.api.routes import openai_files, openai_fine_tuning, openai_models

router = APIRouter()
for _module in (openai_files, openai_fine_tuning, openai_models):
    router.include_router(_module.router)
