import numpy as np
import torch

from dpformer.evaluation.evaluate import popularity_classes
from dpformer.report.attention_plot import attention_lift


def test_groups_share_occurrences():
    frequencies = np.concatenate([[0.0], 1 / np.arange(1, 101)])
    groups = popularity_classes(frequencies)
    assert (np.diff(groups[1:]) >= 0).all(), "less popular items are never in a more popular group"
    shares = np.array([frequencies[groups == g].sum() for g in range(3)]) / frequencies.sum()
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.07)


def test_uniform_attention_has_a_lift_of_one_for_every_group():
    s = torch.randint(1, 30, (5, 8))
    s[0, 5:] = 0
    uniform = (torch.tril(torch.ones(8, 8)) / torch.arange(1, 9)[:, None]).expand(5, 2, 8, 8)
    groups = torch.from_numpy(popularity_classes(np.r_[0.0, np.ones(29)]))
    torch.testing.assert_close(attention_lift(uniform, s, groups), torch.ones(3))
