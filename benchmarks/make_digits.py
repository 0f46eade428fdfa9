"""Make ``src/m3d/data/digits.npz`` from scikit-learn's copy of the UCI optical digits; see ``digits.md`` beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TARGET = Path(__file__).parents[1] / "src" / "m3d" / "data" / "digits.npz"


def main() -> None:
    """Scale 0..16 to 0..255, split once and for all, and write."""
    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]  # [1797, 8, 8, 1]
    labels = digits.target.astype(np.int64)
    x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=450, stratify=labels, random_state=0)
    np.savez_compressed(TARGET, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    print(f"{TARGET}: {len(x_train)} + {len(x_test)} images, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
