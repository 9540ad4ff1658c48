"""What a notebook, a print and scikit-learn see of the objects that people hold."""

import copy
from xml.etree import ElementTree

import pytest
import yaml

from dpformer import DPFormer, notebook
from dpformer.data import demo_frame
from dpformer.errors import DPFormerError


@pytest.fixture(scope="module")
def fitted():
    return DPFormer("popularity", epsilon=4).fit(demo_frame())


def test_text_is_escaped():
    page = ElementTree.fromstring(f"<div>{notebook.table('<b>', ('a', '&'), [('x', '<script>')], ['1 < 2'])}</div>")
    assert page.findtext("p/strong") == "<b>"
    assert [cell.text for cell in page.iter("td")] == ["<script>"]
    assert page.findtext("p[2]") == "1 < 2"


def test_settings_are_given_back_and_changed():
    model = DPFormer("pure", epsilon=3, epochs=2.0)
    assert model.get_params() == {"preset": "pure", "account": None, "epsilon": 3, "epochs": 2.0}
    again = DPFormer(**model.get_params(deep=False))  # what sklearn.base.clone does
    assert again.recipe == model.recipe
    assert copy.deepcopy(model).get_params() == model.get_params()
    assert model.set_params(epsilon=5) is model
    assert model.recipe.epsilon == 5
    assert model.get_params()["epsilon"] == 5


def test_a_wrong_setting_changes_nothing():
    model = DPFormer("pure", epsilon=3)
    with pytest.raises(DPFormerError, match="epochz"):
        model.set_params(epsilon=4, epochz=2)
    assert model.recipe.epsilon == 3
    assert "epochz" not in model.get_params()


def test_representations_say_what_is_promised(fitted, tmp_path):
    assert repr(DPFormer(epsilon=8)) == "<DPFormer(preset='default', epsilon=8): not fitted>"
    promise = "(4, 1e-05)-differential privacy"
    assert promise in repr(fitted)
    assert promise in fitted._repr_html_()
    assert promise in repr(fitted.privacy)
    assert str(fitted.privacy) == fitted.privacy.text()
    shown = ElementTree.fromstring(f"<div>{fitted.privacy._repr_html_()}</div>")
    lines = fitted.privacy.text().splitlines()
    assert len(list(shown.iter("tr"))) == len(lines) - 1
    fitted.save(tmp_path / "saved")
    loaded = DPFormer.load(tmp_path / "saved")
    assert promise in repr(loaded)
    assert promise in loaded._repr_html_()
    with pytest.raises(DPFormerError, match="recipe"):
        loaded.get_params()


def test_an_evaluation_has_its_protocol_and_says_that_it_is_not_private(fitted):
    found = fitted.evaluate()
    assert "NDCG@10" in repr(found)
    assert "not private" in repr(found)
    page = found._repr_html_()
    assert found.masked["ndcg@10"].text() in page
    assert "no sampling" in page
    assert "not private" in page


def test_the_model_card_begins_with_what_a_model_hub_reads(fitted):
    _, front, page = (fitted.folder / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["library_name"] == "dpformer"
    assert "differential-privacy" in fields["tags"]
    assert fields["differential_privacy"]["epsilon"] == pytest.approx(4, rel=1e-3)
    assert page.strip().startswith("# A next-item recommender")
