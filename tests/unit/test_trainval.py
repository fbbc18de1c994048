"""What trainval.py makes of its flags, without training anything."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

import trainval
from trainer.launch import ending


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command hands over to the training, which does not come."""
    handed: dict[str, Any] = {}

    def train(experiments: list[dict[str, Any]], options: dict[str, Any]) -> int:
        handed.update(options)
        return 0

    monkeypatch.setattr(trainval, "_train", train)
    monkeypatch.setattr(ending, "leave", lambda code: None)
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "LATHE_OUTCOME"):
        monkeypatch.delenv(name, raising=False)
    return handed


def run(*flags: str) -> None:
    result = CliRunner().invoke(trainval.app, ["-e", "causal_lm_tiny", "-sb", "results", *flags])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_reset_is_obeyed_at_the_first_start_and_not_when_a_launcher_starts_again(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, is_obeyed in ((None, True), ("0", True), ("1", False), ("2", False)):
        if count is not None:
            monkeypatch.setenv(name, count)
        run("-r", "1")
        assert options["reset"] is is_obeyed, count
    run("-r", "0")
    assert options["reset"] is False
