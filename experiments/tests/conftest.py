"""The embedded data, prepared once, and what these tests share with those of `dpformer`."""

from pathlib import Path

import pytest

from dpformer.data import demo_frame, prepare, save
from tests.conftest import dpformer, ml_1m, video_txt

__all__ = ["demo", "dpformer", "ml_1m", "video_txt"]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("demo") / "data"
    save(prepare(demo_frame()), folder)
    return {"demo": folder}
