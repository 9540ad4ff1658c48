import torch

from dpformer.report.attention_plot import attention_lift, popularity_groups


def test_groups_share_occurrences():
    frequencies = torch.cat([torch.zeros(1), 1 / torch.arange(1, 101)])
    groups = popularity_groups(frequencies)
    assert groups[0] == -1
    assert (groups[1:].diff() >= 0).all(), "less popular items are never in a more popular group"
    shares = torch.stack([frequencies[groups == g].sum() for g in range(3)]) / frequencies.sum()
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.07)


def test_uniform_attention_has_a_lift_of_one_for_every_group():
    s = torch.randint(1, 30, (5, 8))
    s[0, 5:] = 0
    uniform = (torch.tril(torch.ones(8, 8)) / torch.arange(1, 9)[:, None]).expand(5, 2, 8, 8)
    lift = attention_lift(uniform, s, popularity_groups(torch.rand(30)))
    torch.testing.assert_close(lift, torch.ones(3))
