"""The matrix: one module per op family. Data, not code; both backends run all of it."""

from tests.matrix.gmm import GMM, TGMM

OPS = (GMM, TGMM)
