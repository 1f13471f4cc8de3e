# SPDX-License-Identifier: Apache-2.0
"""What a hand-off costs at D, end to end: `python -m vllm_datadist.bench`.

Real vLLM servers, a prefill (P) and a decode server (D), with our connector over each of its backends and with vLLM's
own NixlConnector. Everything is measured from outside, over HTTP, so that it is the same for all: how much longer D
takes to its first token if the prompt's KV cache has to come from P than if D has it in its own prefix cache.

Read on in `measure.py`, which says exactly how, then `contenders.py` (who, with which settings) and `results.py` (the
bars). `servers.py`, `http_calls.py` and `model.py` are the means.
"""
