# SPDX-License-Identifier: Apache-2.0
"""Layer by layer: the prompt sends each layer as soon as its model has computed it.

    python -m examples.flows.layerwise

or in two terminals:

    python -m examples.flows.layerwise --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.layerwise --role decoder --connect 127.0.0.1:26000

With a TransferConfig the prompt has to know the addresses of the decoder's tensors. How it learns them is up to the
serving system; here the decoder tells it in a note over the link (see `Notes` in _ends.py).
"""

from __future__ import annotations

import threading

import datadist_core as llm_datadist

from ._ends import DECODER, PROMPT, Array, End, cluster_info, fill, main, pattern

NUM_LAYERS = 4
DESC = llm_datadist.CacheDesc(
    num_tensors=2 * NUM_LAYERS,
    shape=[16, 128, 64],
    data_type=llm_datadist.DataType.DT_FLOAT,
    placement=llm_datadist.Placement.HOST,
)
Status = llm_datadist.LLMStatusCode


class LayerEvents(llm_datadist.LayerSynchronizer):
    """Lets a layer go once the model has said that it is ready."""

    def __init__(self) -> None:
        self.ready = [threading.Event() for _ in range(NUM_LAYERS)]
        self.asked_for: list[int] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked_for.append(layer_index)
        return self.ready[layer_index].wait(None if timeout_in_millis is None else timeout_in_millis / 1000)


def prompt(end: End) -> None:
    config = end.config()
    config.listen_ip_info = end.listen
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, PROMPT) as prompt:
        prompt.init(config.generate_options())
        notes = end.notes(prompt)
        manager = prompt.cache_manager
        cache = manager.allocate_blocks_cache(DESC)
        addrs = notes.wait(DECODER, "addresses of the tensors")

        by_address = llm_datadist.TransferConfig(DECODER, addrs)
        send(end, manager, cache, by_address, end.seed, [2, 3])
        notes.tell(DECODER, "sent by address")
        notes.wait(DECODER, "checked")  # what comes next goes into the same cache

        # The decoder's cache has a key as well: then no addresses are needed, and layers can be chosen on both ends.
        by_key = llm_datadist.TransferWithCacheKeyConfig(llm_datadist.BlocksCacheKey(DECODER))
        send(end, manager, cache, by_key, end.seed + 1, [8, 9])
        notes.tell(DECODER, "sent by key")
        notes.wait_unlinked(DECODER)
        manager.deallocate_blocks_cache(cache)


def send(
    end: End,
    manager: llm_datadist.CacheManager,
    cache: llm_datadist.Cache,
    config: llm_datadist.TransferConfig | llm_datadist.TransferWithCacheKeyConfig,
    seed: int,
    dst_blocks: list[int],
) -> None:
    """Blocks 0 and 1, one layer after the other, while another thread computes them."""
    fill(cache, [0.0 * tensor for tensor in pattern(DESC, seed)])  # so that a layer sent too early would be noticed
    events = LayerEvents()
    task = manager.transfer_cache_async(cache, events, [config], src_block_indices=[0, 1], dst_block_indices=dst_blocks)
    model = threading.Thread(target=compute, args=(end, cache, pattern(DESC, seed), events), daemon=True)
    model.start()
    end.check(f"{type(config).__name__}: the task", task.synchronize(timeout_in_millis=20_000), Status.LLM_SUCCESS)
    end.check("one result per destination", task.get_results(timeout_in_millis=1000), [Status.LLM_SUCCESS])
    end.check("layers were asked for in order", events.asked_for, list(range(NUM_LAYERS)))
    model.join()


def compute(end: End, cache: llm_datadist.Cache, values: list[Array], events: LayerEvents) -> None:
    """The model, in its own thread: computes a layer, lets it go, goes on with the next."""
    for layer in range(NUM_LAYERS):
        for i in (2 * layer, 2 * layer + 1):
            cache.numpy()[i][:] = values[i]
        end.say(f"layer {layer} is computed")
        events.ready[layer].set()


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, DECODER) as decoder:
        decoder.init(end.config().generate_options())
        cache = decoder.cache_manager.allocate_blocks_cache(DESC, llm_datadist.BlocksCacheKey(DECODER))
        expected = pattern(DESC, end.seed + 2)
        fill(cache, expected)
        cluster = cluster_info(PROMPT, end.connect[0])
        notes = end.notes(decoder)
        end.must_succeed("link_clusters", decoder.link_clusters([cluster], timeout=5000))
        notes.tell(PROMPT, "addresses of the tensors", cache.tensor_addrs)

        notes.wait(PROMPT, "sent by address")
        for tensor, source in zip(expected, pattern(DESC, end.seed), strict=True):
            tensor[[2, 3]] = source[[0, 1]]
        end.check("blocks 2 and 3 of all layers, no other block changed", cache.numpy(), expected)
        notes.tell(PROMPT, "checked")
        notes.wait(PROMPT, "sent by key")
        for tensor, source in zip(expected, pattern(DESC, end.seed + 1), strict=True):
            tensor[[8, 9]] = source[[0, 1]]
        end.check("blocks 8 and 9 of all layers, no other block changed", cache.numpy(), expected)
        end.must_succeed("unlink_clusters", decoder.unlink_clusters([cluster], timeout=5000))
        decoder.cache_manager.deallocate_blocks_cache(cache)


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder})
