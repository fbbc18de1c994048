"""Who speaks in a conversation: the names that people write, and ours."""

from __future__ import annotations

from typing import Any

ASSISTANT = "assistant"
# The names that people give to the roles, in lower case: OpenAI; ShareGPT (human, gpt, bing, bard);
# Gemini (model); LLaMA-Factory (function_call, observation); OpenAssistant (prompter); Cohere
# (chatbot); Llama 3 (ipython); Hermes (tool_call, tool_response) and Glaive (function_response).
CALL = "function_call"
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), ASSISTANT),
    **dict.fromkeys(("model", "bot", "chatbot", "ai"), ASSISTANT),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
    **dict.fromkeys((CALL, "tool_call"), CALL),
}


def role_of(given: Any) -> str | None:
    """The role that people give this name, one of ROLES' values; None for no such name."""
    return ROLES.get(given.strip().lower().replace("-", "_")) if isinstance(given, str) else None
