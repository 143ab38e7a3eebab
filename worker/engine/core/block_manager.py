"""Allocates blocks of the KV cache, shares equal prefixes, and evicts cached blocks (LRU)."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain, islice

from promptq.worker.engine.core.kept_states import KeptStates
from promptq.worker.engine.core.sequence import Sequence


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns the number of blocks for this many tokens of one sequence."""
    return -(-num_tokens // block_size)


class BlockManager:
    """Hands out blocks, counts their owners, and finds blocks by the prefix that they hold.

    Every block is in one of three states. A *free* block holds nothing. An *owned* block is in as
    many block tables as it has references. A *cached* block has no owner, but can be found by its
    hash until it is evicted. The hash of a block covers its tokens, all tokens before them, the
    tenant and the cache salt. An owned block can be found, too, once all its tokens are computed.

    Eviction is LRU (least recently used): when no block is free, the manager allocates the block
    that has been cached longest. A sequence's last blocks are evicted before its first ones.
    Sessions get no other treatment: keeping their blocks for a learned time between turns gained
    nothing with simulated agents, because the order of eviction among sessions stays the same.

    With `shares_tenants` the hash leaves the tenant out, so that tenants find each other's
    prefixes. The manager then notes which tenants sent a block. A tenant's cached tokens count only
    blocks that this tenant sent.

    The states of recurrent layers are not in the blocks. If the model has such layers, a sequence
    can share a prefix only if `kept_states` has the state after this prefix. Sometimes the manager
    finds the blocks of a longer prefix, but no state after it. Then the sequence is at least the
    second with this prefix, and a third may follow. So the engine keeps this sequence's state after
    the longer prefix.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        shares_tenants: bool = False,
        kept_states: KeptStates | None = None,
    ) -> None:
        self.kept_states = kept_states
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._all_blocks = frozenset(range(num_blocks))
        self.num_gained = 0
        """Number of times that a block lost its last owner or became findable. A waiting sequence
        that lacked room still lacks room while this number does not change."""
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # of findable blocks
        self._findable: dict[bytes, int] = {}
        self._senders: list[set[str]] | None = None  # which tenants sent the content of a block
        if shares_tenants:
            self._senders = [set() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # evicted in this order: LRU

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: free blocks, and cached blocks after eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def shared_blocks(self, sequence: Sequence) -> list[int]:
        """Returns the blocks of the sequence that other sequences own too."""
        return [block for block in sequence.block_table if self._references[block] > 1]

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the blocks that already have K and V of the sequence's first tokens. These blocks
        never cover the last token, or a token whose logits are needed, because a step must compute
        these tokens."""
        prefix = self._findable_blocks(sequence)
        if self.kept_states is None:
            return prefix
        return prefix[: self.kept_states.longest(sequence.block_hashes, len(prefix))]

    def _findable_blocks(self, sequence: Sequence) -> list[int]:
        self._hash_blocks(sequence)
        prefix: list[int] = []
        num_shareable = sequence.num_cacheable_tokens // self.block_size
        for block_hash in islice(sequence.block_hashes, num_shareable):
            block = self._findable.get(block_hash)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def num_known_to(self, tenant: str, prefix: list[int]) -> int:
        """Returns how many blocks of a prefix the tenant sent before. Records that the tenant has
        now sent all of them."""
        if self._senders is None:
            return len(prefix)
        num_known = 0
        for block in prefix:
            num_known += tenant in self._senders[block]
            self._senders[block].add(tenant)
        return num_known

    def num_needed(self, sequence: Sequence, prefix: list[int]) -> int:
        """Returns how many of the `num_free` blocks a sequence without blocks would take for its
        known tokens. Blocks of `prefix` that other sequences already own do not count."""
        owned = sum(1 for block in prefix if self._references[block])
        return num_blocks_for(sequence.num_tokens, self.block_size) - owned

    def num_free_after(
        self, leaving: Iterable[Sequence], prefix: list[int]
    ) -> Iterator[tuple[Sequence, int]]:
        """Yields each sequence of `leaving`, with the value of `num_free` after this sequence and
        the earlier sequences have left. Blocks of `prefix` do not become free."""
        num_free = self.num_free
        references: dict[int, int] = dict.fromkeys(prefix, 0)
        for sequence in leaving:
            for block in sequence.block_table:
                references[block] = references.get(block, self._references[block]) - 1
                num_free += references[block] == 0
            yield sequence, num_free

    def allocate(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a sequence without blocks its cached prefix, and blocks for all other known tokens.
        Raises RuntimeError, and changes nothing, if there are too few blocks."""
        if self.num_needed(sequence, prefix) > self.num_free:
            raise RuntimeError(
                f"sequence {sequence.sequence_id} needs {self.num_needed(sequence, prefix)} blocks "
                f"and {self.num_free} are free"
            )
        for block in prefix:
            self._cached.pop(block, None)
            self._references[block] += 1
        sequence.block_table.extend(prefix)
        self.extend(sequence)
        if self.kept_states is not None:
            if num_findable := len(self._findable_blocks(sequence)) - len(prefix):
                sequence.keep_after = (len(prefix) + num_findable) * self.block_size
            if prefix:
                sequence.state_source = self.kept_states.pin(sequence.block_hashes[len(prefix) - 1])

    def reserve_state(self, sequence: Sequence, end: int) -> None:
        """Reserve a place for a sequence's state, if the state after `end` tokens will be kept."""
        is_due = end == sequence.keep_after and sequence.state_target is None
        if self.kept_states is not None and is_due:
            sequence.state_target = self.kept_states.reserve()

    def extend(self, sequence: Sequence, num_further: int = 0) -> bool:
        """Give the sequence blocks for all known tokens and `num_further` more tokens. Returns
        False, and changes nothing, if there are too few blocks."""
        num_tokens = sequence.num_tokens + num_further
        num_missing = num_blocks_for(num_tokens, self.block_size) - len(sequence.block_table)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free:
            return False
        sequence.block_table.extend(self._take() for _ in range(num_missing))
        return True

    def mark_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Record that the tokens `start` to `end - 1` are computed. Blocks that became full can now
        be found by their hash."""
        first, last = start // self.block_size, end // self.block_size
        if sequence.state_source is not None and self.kept_states is not None:
            self.kept_states.unpin(sequence.state_source)
            sequence.state_source = None
        if first == last:
            return
        self._hash_blocks(sequence)
        for index in range(first, last):
            block, block_hash = sequence.block_table[index], sequence.block_hashes[index]
            if block_hash not in self._findable:
                self._findable[block_hash] = block
                self._hashes[block] = block_hash
                self.num_gained += 1
            if self._senders is not None:
                self._senders[self._findable[block_hash]].add(sequence.request.tenant)
        if end == sequence.keep_after and sequence.state_target is not None:
            assert self.kept_states is not None, "only then there are places"
            self.kept_states.publish(sequence.block_hashes[last - 1], sequence.state_target)
            sequence.state_target = None
            self.num_gained += last  # a waiting sequence may need fewer blocks now

    def free(self, sequence: Sequence) -> None:
        """Take back a sequence's blocks. A block without another owner becomes cached if it has a
        hash, otherwise free."""
        for block in reversed(sequence.block_table):
            self._references[block] -= 1
            if self._references[block] == 0:
                self.num_gained += 1
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        sequence.block_table.clear()
        sequence.keep_after = 0
        if self.kept_states is not None:
            if sequence.state_source is not None:
                self.kept_states.unpin(sequence.state_source)
            if sequence.state_target is not None:
                self.kept_states.release(sequence.state_target)
            sequence.state_source = sequence.state_target = None

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Compare all blocks with the block tables of `sequences`: all sequences that have blocks.
        Raises RuntimeError, which names the inconsistency."""
        sequences = [*sequences]
        if self.kept_states is not None:
            self.kept_states.check_integrity(sequences)
        entries = Counter(block for sequence in sequences for block in sequence.block_table)
        states = {"free": self._free, "cached without owner": self._cached, "owned": entries}
        num_stated = sum(len(blocks) for blocks in states.values())
        if num_stated != self.num_blocks or set().union(*states.values()) != self._all_blocks:
            times = Counter(chain(*states.values()))
            known = self._all_blocks
            wrong = sorted(b for b in known | times.keys() if times[b] != (b in known))
            counts = " + ".join(f"{len(blocks)} {state}" for state, blocks in states.items())
            raise RuntimeError(
                f"{counts} against {self.num_blocks} blocks: "
                f"{wrong} are in several states, in none, or do not exist"
            )
        for block, count in entries.items():
            if self._references[block] != count:
                raise RuntimeError(
                    f"block {block} has {self._references[block]} references "
                    f"and {count} block table entries"
                )
        if self.num_blocks - self._references.count(0) != len(entries):
            referenced = {block for block, count in enumerate(self._references) if count}
            raise RuntimeError(
                f"blocks {sorted(referenced - entries.keys())} have references "
                "and no block table entries"
            )
        if any(map(self._hashes.__getitem__, self._free)):
            raise RuntimeError("a free block is findable")
        if not all(map(self._hashes.__getitem__, self._cached)):
            raise RuntimeError("a cached block is not findable")
        num_hashed = self.num_blocks - self._hashes.count(None)
        hashes = map(self._hashes.__getitem__, self._findable.values())
        if num_hashed != len(self._findable) or list(hashes) != list(self._findable):
            raise RuntimeError("the index of findable blocks differs from the blocks' hashes")

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash, self._hashes[block] = self._hashes[block], None
        if block_hash is not None:
            del self._findable[block_hash]
            if self._senders is not None:
                self._senders[block].clear()
        return block

    def _hash_blocks(self, sequence: Sequence) -> None:
        """Compute the hashes of the sequence's full blocks. The hash is cryptographic, so that no
        other prefix has the same hash."""
        hashes, size = sequence.block_hashes, self.block_size
        for index in range(len(hashes), sequence.num_tokens // size):
            parent = hashes[-1] if hashes else self._salt_hash(sequence)
            token_ids = array("q", sequence.token_ids[index * size : (index + 1) * size])
            hashes.append(_hash(parent + token_ids.tobytes()))

    def _salt_hash(self, sequence: Sequence) -> bytes:
        """Returns a hash of tenant and cache salt, which the hash of the first block includes."""
        # `person` makes these hashes differ from those of blocks. The hash of the tenant has a
        # fixed length, so no salt can imitate another tenant and salt.
        tenant = "" if self._senders is not None else sequence.request.tenant
        salt = sequence.request.cache_salt.encode("utf-8", "surrogatepass")
        text = _hash(tenant.encode("utf-8", "surrogatepass"), b"tenant") + salt
        return _hash(text, b"cache_salt")


def _hash(text: bytes, person: bytes = b"") -> bytes:
    return blake2b(text, digest_size=32, person=person).digest()
