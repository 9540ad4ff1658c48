"""Everything that scores histories: networks, released statistics, and their sum. torch only."""

from dpformer.models.ensemble import Ensemble
from dpformer.models.network import Network
from dpformer.models.reattention import ReAttention
from dpformer.models.recommender import Recommender, Spec, build, parse_spec, restore
from dpformer.models.recurrent import GRU, LSTM, RecurrentSpec
from dpformer.models.transformer import Transformer, TransformerSpec
from dpformer.models.transitions import Popularity, TransitionScorer

__all__ = ["GRU", "LSTM", "Ensemble", "Network", "Popularity", "ReAttention", "Recommender", "RecurrentSpec", "Spec"]
__all__ += ["Transformer", "TransformerSpec", "TransitionScorer", "build", "parse_spec", "restore"]
