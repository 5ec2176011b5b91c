"""PrefixIndex: which stored token sequence is the longest that a prompt starts with.

A stored prefix P covers the prompts from P itself up to P∞, P followed by a token above all others. The 2n edges of those
intervals are kept in lexicographic order, each with the innermost interval that is open after it, so the answer stands at
the last edge that is not above the prompt. That edge is found by Manber and Myers' binary search ("Suffix arrays: a new
method for on-line string searches", 1993): a tree over the gaps between edges holds the longest common prefix (LCP) of
every pair of edges that bound a search interval, so no token of the prompt is compared twice and a look-up takes
O(len(prompt) + log n) steps whatever the stored prefixes look like. Ids are compared, never hashes.

Adding and removing take O(n): arrays are shifted and the tree above the shifted gaps is filled again.
"""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove

from .tokens cimport c_common_prefix_len

from itertools import pairwise
from os.path import commonprefix

import numpy as np


cdef class Prefix:
    """An owned, immutable copy of at least one token id; the kind of object that a PrefixIndex stores."""

    def __cinit__(self, const int32_t[::1] tokens not None, *unused):
        cdef Py_ssize_t n = tokens.shape[0]
        if not 0 < n <= INT32_MAX:
            raise ValueError(f"a prefix must hold from 1 to {INT32_MAX} tokens, got {n}")
        self.ids = <int32_t *>malloc(n * sizeof(int32_t))
        if self.ids == NULL:
            raise MemoryError()
        memcpy(self.ids, &tokens[0], n * sizeof(int32_t))
        self.n_tokens = n

    def __dealloc__(self):
        free(self.ids)

    @property
    def tokens(self):
        """A new int32 array of the ids, shape (n_tokens,)."""
        return np.array(<int32_t[:self.n_tokens]>self.ids)


@cython.final
cdef class PrefixIndex:
    """A set of prefixes that answers "the longest one that this prompt starts with"."""

    # _keys[1 .. _n_keys] are the edges in order; _keys[0] stands below all. _lcp is a heap-shaped tree of _n_leaves (a power
    # of two) leaves: leaf j, at _lcp[_n_leaves + j], is the LCP of the edges j and j + 1, a node is the minimum of its two
    # children. Beyond the last edge lies a sentinel above all; whatever touches a sentinel has LCP 0.

    def __cinit__(self):
        self._stored = set()
        if not self._resize(4):
            raise MemoryError()
        self._keys[0].prefix = self._keys[0].longest = NULL

    def __dealloc__(self):
        free(self._keys)
        free(self._lcp)

    def __len__(self):
        return self.c_size()

    def add(self, const int32_t[::1] tokens not None):
        """Store a copy of `tokens` (at least one) unless they are stored; returns the stored Prefix."""
        prefix = Prefix(tokens)
        stored = self.c_get(prefix.ids, prefix.n_tokens)
        if stored is not None:
            return stored
        self.c_add(prefix)
        return prefix

    def remove(self, const int32_t[::1] tokens not None):
        """Forget exactly `tokens`; whether they were stored."""
        prefix = self.get(tokens)
        if prefix is not None:
            self.c_remove(prefix)
        return prefix is not None

    def find(self, const int32_t[::1] tokens not None):
        """The longest stored Prefix that `tokens` start with, or None."""
        return self.c_find(&tokens[0], tokens.shape[0]) if tokens.shape[0] > 0 else None

    def get(self, const int32_t[::1] tokens not None):
        """The stored Prefix equal to `tokens`, or None."""
        return self.c_get(&tokens[0], tokens.shape[0]) if tokens.shape[0] > 0 else None

    def _check(self):
        """Assert the invariants, each computed anew the slow way."""
        cdef Prefix prefix
        cdef Prefix longest
        leaves = [self._lcp[self._n_leaves + j] for j in range(self._n_leaves)]
        edges = [(<Prefix>self._keys[i].prefix, self._keys[i].is_end) for i in range(1, self._n_keys + 1)]
        ordered = sorted(
            [(prefix.tokens.tolist() + end, prefix) for prefix in self._stored for end in ([], [float("inf")])], key=lambda edge: edge[0])
        assert [(prefix, len(ids) > prefix.n_tokens) for ids, prefix in ordered] == edges, "edges out of order"
        assert self.c_size() == len(self._stored)
        nested = [None]
        for i, (prefix, is_end) in enumerate(edges, 1):
            if is_end:
                assert nested.pop() is prefix, "intervals cross"
            else:
                nested.append(prefix)
            longest = None if self._keys[i].longest == NULL else <Prefix>self._keys[i].longest
            assert longest is nested[len(nested) - 1], f"edge {i} names the wrong prefix"
            assert self._keys[i].ids == prefix.ids and self._keys[i].n_tokens == prefix.n_tokens
        ids = [[]] + [prefix.tokens.tolist() for prefix, _ in edges]
        lcps = [len(commonprefix([a, b])) for a, b in pairwise(ids)]
        assert leaves == lcps + [0] * (self._n_leaves - len(lcps)), "leaves"
        for node in range(1, self._n_leaves):
            assert self._lcp[node] == min(self._lcp[2 * node], self._lcp[2 * node + 1]), f"node {node}"

    cdef Prefix c_find(self, const int32_t *ids, Py_ssize_t n):
        cdef int32_t below, above
        cdef void *longest = self._keys[self._search(ids, n, &below, &above)].longest
        return None if longest == NULL else <Prefix>longest

    cdef Prefix c_get(self, const int32_t *ids, Py_ssize_t n):
        prefix = self.c_find(ids, n)  # nothing that `ids` start with is longer than `ids`
        return prefix if prefix is not None and prefix.n_tokens == n else None

    cdef Py_ssize_t c_size(self) noexcept:
        return self._n_keys // 2

    cdef int c_add(self, Prefix prefix) except -1:
        """Store `prefix`, which isn't stored; on an error nothing has changed. Runs no Python code."""
        cdef int32_t below, above
        cdef int32_t n = <int32_t>prefix.n_tokens
        cdef Py_ssize_t start, end
        cdef void *outer
        if self._n_keys + 3 > self._n_leaves and not self._resize(2 * self._n_leaves):
            raise MemoryError()
        self._stored.add(prefix)
        start = self._search(prefix.ids, n, &below, &above) + 1
        outer = self._keys[start - 1].longest
        # The start edge, then past every edge that begins with the prefix, the end edge.
        self._insert_key(start, prefix, False)
        self._lcp[self._n_leaves + start - 1] = below
        self._lcp[self._n_leaves + start] = above
        end = start + 1
        while self._lcp[self._n_leaves + end - 1] >= n:
            if self._keys[end].longest == outer:
                self._keys[end].longest = <void *>prefix
            end += 1
        above = self._lcp[self._n_leaves + end - 1]
        self._insert_key(end, prefix, True)
        self._keys[end].longest = outer
        self._lcp[self._n_leaves + end - 1] = n
        self._lcp[self._n_leaves + end] = above
        self._update_nodes(start - 1)
        return 0

    cdef int c_remove(self, Prefix prefix) except -1:
        """Forget `prefix`, which is stored and which the caller holds. Runs no Python code."""
        cdef int32_t below, above
        cdef Py_ssize_t start = self._search(prefix.ids, prefix.n_tokens, &below, &above)
        cdef Py_ssize_t end = start + 1
        cdef void *outer
        while self._keys[end].prefix != <void *>prefix:
            end += 1
        outer = self._keys[end].longest
        for i in range(start + 1, end):
            if self._keys[i].longest == <void *>prefix:
                self._keys[i].longest = outer
        self._delete_key(end)
        self._delete_key(start)
        self._update_nodes(start - 1)
        self._stored.discard(prefix)
        if self._n_leaves > 4 and 4 * (self._n_keys + 3) <= self._n_leaves:
            self._resize(self._n_leaves // 2)  # a failure leaves it as it was
        return 0

    cdef Py_ssize_t _search(self, const int32_t *ids, Py_ssize_t n, int32_t *lcp_below, int32_t *lcp_above) noexcept nogil:
        """Index of the last edge that is not above the prompt `ids`, and the prompt's LCP with that edge and with the next."""
        cdef Py_ssize_t at = 0, mid, node = 1, span = self._n_leaves >> 1
        cdef int32_t below = 0, above = 0  # the prompt's LCP with the edges `at` and `at` + 2 * span
        cdef int32_t known, lcp
        cdef const Key *key
        cdef bint right
        while span > 0:
            mid = at + span
            node = 2 * node
            if below >= above:
                known = below
                lcp = self._lcp[node]  # of the edges `at` and `mid`
                right = lcp > known
            else:
                known = above
                lcp = self._lcp[node + 1]  # of the edges `mid` and `at` + 2 * span
                right = lcp < known
            if lcp < known:
                known = lcp
            elif lcp == known:
                if mid > self._n_keys:
                    right = False
                else:
                    key = &self._keys[mid]
                    known += <int32_t>c_common_prefix_len(ids + known, key.ids + known, min(n, key.n_tokens) - known)
                    if known == key.n_tokens:
                        right = not key.is_end
                    else:
                        right = known < n and key.ids[known] < ids[known]
            if right:
                at = mid
                below = known
                node += 1
            else:
                above = known
            span >>= 1
        lcp_below[0] = below
        lcp_above[0] = above
        return at

    cdef void _insert_key(self, Py_ssize_t at, Prefix prefix, bint is_end) noexcept:
        """Make room for an edge; the caller sets its two LCPs."""
        cdef int32_t *leaves = self._lcp + self._n_leaves
        memmove(&self._keys[at + 1], &self._keys[at], (self._n_keys + 1 - at) * sizeof(Key))
        memmove(&leaves[at + 1], &leaves[at], (self._n_keys + 1 - at) * sizeof(int32_t))
        self._keys[at].ids = prefix.ids
        self._keys[at].n_tokens = <int32_t>prefix.n_tokens
        self._keys[at].is_end = is_end
        self._keys[at].prefix = self._keys[at].longest = <void *>prefix
        self._n_keys += 1

    cdef void _delete_key(self, Py_ssize_t at) noexcept:
        cdef int32_t *leaves = self._lcp + self._n_leaves
        leaves[at - 1] = min(leaves[at - 1], leaves[at])
        memmove(&self._keys[at], &self._keys[at + 1], (self._n_keys - at) * sizeof(Key))
        memmove(&leaves[at], &leaves[at + 1], (self._n_keys - at) * sizeof(int32_t))
        self._n_keys -= 1

    cdef void _update_nodes(self, Py_ssize_t first) noexcept nogil:
        """Fill the tree above the leaves from `first` on. There is an even number of edges, so what lies beyond their leaves is 0."""
        cdef Py_ssize_t node, left = self._n_leaves + first, right = self._n_leaves + self._n_keys
        while left > 1:
            left >>= 1
            right >>= 1
            for node in range(left, right + 1):
                self._lcp[node] = min(self._lcp[2 * node], self._lcp[2 * node + 1])

    cdef bint _resize(self, Py_ssize_t n_leaves) noexcept:
        """Room for `n_leaves` - 1 edges; False, with nothing changed, where memory is short."""
        cdef int32_t *lcp = <int32_t *>calloc(2 * n_leaves, sizeof(int32_t))
        cdef Key *keys
        if lcp == NULL:
            return False
        keys = <Key *>realloc(self._keys, n_leaves * sizeof(Key))
        if keys == NULL:
            free(lcp)
            return False
        self._keys = keys
        if self._lcp != NULL:
            memcpy(lcp + n_leaves, self._lcp + self._n_leaves, (self._n_keys + 1) * sizeof(int32_t))
            free(self._lcp)
        self._lcp = lcp
        self._n_leaves = n_leaves
        self._update_nodes(0)
        return True
