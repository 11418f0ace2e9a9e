# SPDX-License-Identifier: Apache-2.0
"""The features that a call can need, a sentence each."""

import enum


class Feature(enum.Enum):
    """One capability that a backend may declare. Core refuses calls that need a feature their backend lacks."""

    GRADIENTS = "The gradients of query, key and value."
    FLOAT32 = "float32 inputs, exact to float32 unless `precision` says otherwise."
    FLOAT16 = "float16 inputs."
    BFLOAT16 = "bfloat16 inputs."
    CAUSAL = "A query sees no key after it."
    SLIDING_WINDOW = "A query sees the keys within a distance on either side."
    CHUNKED = "A query sees its own chunk, causally."
    SEGMENT_IDS = "A query sees the keys of its own segment; negative ids are padding."
    KEY_RANGE = "A query sees the keys between two positions of its own, known at run time."
    POSITIONS = "Positions of the caller's own replace those of the layout."
    MASK_BUILDER = "A mask of the mask algebra, or anything indexable, for each head."
    ATTENTION_MASK = "A dense boolean mask."
    SELECTED = "A query sees the keys, or blocks of keys, whose ids it is given, for each group of heads."
    GROUPED_HEADS = "Fewer key heads than query heads (GQA, MQA)."
    UNEQUAL_VALUE_DIM = "Values of another size than queries and keys."
    CROSS_LENGTHS = "The number of queries differs from the number of keys."
    SOFT_CAP = "Scores are capped by tanh."
    SINKS = "Logits that enter the denominator only, with their gradient."
    BIAS = "A bias on the scores, with its gradient."
    ALIBI = "A slope for each head times the distance is subtracted from scores, with its gradient."
    DROPOUT = "Attention weights are dropped by random bits that depend on a seed and on global indices only."
    RETURN_LSE = "The log-sum-exp of the scores is returned too, and is differentiable."
    MAX_LOGITS = "The largest score of each head is returned too, without a gradient."
    ZIGZAG = "Rank r holds chunks r and 2D-1-r."
    STRIPED = "Token i lies on rank i mod D."
    PRECISION = "Matrix products of float32 at a lower precision, where the caller asks."
    FUSED_BACKWARD = "A one-pass backward that may accumulate in any order, where the caller asks."
