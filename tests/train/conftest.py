import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    from tiny_run import write_corpus

    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="session")
def straight(corpus, tmp_path_factory):
    """The run folder of a tiny run that nothing interrupted."""
    from tiny_run import tiny_run

    from k3.train.pretrain import pretrain

    out = tmp_path_factory.mktemp("runs") / "straight"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k3.train.run_folder.write_page", lambda folders, page: page)
        pretrain(tiny_run(corpus), out)
    return out


@pytest.fixture(autouse=True)
def pages(request):
    """The report's plots take seconds; a test that wants them is marked by asking for `report`."""
    if "report" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k3.train.run_folder.write_page", lambda folders, page: page)
        yield


@pytest.fixture
def report():
    """Asks for the real report page."""
