/* history.py, draft_tree.py and Novelty of policy.py in C, for all requests of a step in one call.
   The Python code is the reference: tables, links, trees and estimates are equal, bit by bit.
   compiled_drafter.py compiles this file; library.py declares its structures and functions. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ORDERS 2
#define LONGEST 8
#define PLACES 16 /* MAX_PLACES of draft_tree.py */

static const int order_of[ORDERS] = {LONGEST, 2};

/* A token that may follow: Node of draft_tree.py. */
typedef struct {
    double probability, known;
    int64_t entries[PLACES];           /* places of all children, by child, latest first */
    int32_t tokens[PLACES];            /* of each child */
    int32_t nodes[PLACES];             /* node of each child; 0: it was not drafted */
    int32_t token, parent, depth;
    int32_t first, count;              /* the node's places among its parent's entries */
    int32_t children;                  /* number of them; 0: not looked up, or nothing followed */
} Node;

/* A child that is not drafted yet. */
typedef struct {
    double probability;
    int32_t serial, parent, child, first, count;
} Candidate;

typedef struct {
    int64_t capacity, end;
    int64_t start;                     /* entries up to it are gone, whatever the capacity */
    int64_t full;                      /* whether the tables must not grow now */
    int32_t *tokens;
    int64_t *before, *after, *same[ORDERS], *heads[ORDERS];
} History;

typedef struct {
    History *history;                  /* its owner's */
    int64_t last;                      /* entry of its latest token; 0: none yet */
    double log;                        /* of its novelty */
    Node *tree;                        /* of its last step, until the step's tokens have come */
    int32_t nodes;                     /* of the tree; 0: there is none */
    int32_t length;                    /* of recent */
    int32_t recent[LONGEST];           /* its latest tokens, the latest at the end */
} Request;

typedef struct {
    int64_t topk, num_steps, num_draft_tokens;
    double rate, least_log, most_log;  /* of learning */
} Settings;

typedef struct {
    int64_t nodes, depth, branches;    /* drafted nodes; greatest depth; whether a tree branches */
} Summary;

const int64_t layout[] = {
    ORDERS, LONGEST, 2, PLACES, sizeof(Node), sizeof(Candidate), sizeof(History), sizeof(Request),
    sizeof(Settings), sizeof(Summary),
};

/* The hash of a tuple of integers in CPython, so that history.py can read these tables. */
static uint64_t hash_of(const int32_t *tokens, int count)
{
    const uint64_t one = 11400714785074694791u, two = 14029467366897019727u;
    const uint64_t five = 2870177450012600261u;
    uint64_t hash = five;
    for (int i = 0; i < count; i++) {
        hash += (uint64_t)(int64_t)tokens[i] * two;
        hash = hash << 31 | hash >> 33;
        hash *= one;
    }
    hash += (uint64_t)count ^ five ^ 3527539u;
    return hash == UINT64_MAX ? 1546275796u : hash;
}

static int64_t oldest_of(const History *h)
{
    const int64_t oldest = h->end - h->capacity;
    return oldest > h->start ? oldest : h->start;
}

/* Enter the last of the n-gram's tokens into the chain of its order. */
static void link_entry(History *h, int64_t now, const int32_t *end, int length)
{
    const int64_t mask = h->capacity - 1, slot = now & mask;
    for (int n = 0; n < ORDERS; n++) {
        const int order = order_of[n];
        h->same[n][slot] = 0;
        if (length < order) continue;
        const uint64_t head = hash_of(end - order, order) & (uint64_t)mask;
        h->same[n][slot] = h->heads[n][head];
        h->heads[n][head] = now;
    }
}

/* Make the chains anew, after the tables have moved; heads are 0. */
void relink(History *h)
{
    const int64_t mask = h->capacity - 1, oldest = oldest_of(h);
    int32_t gram[LONGEST];
    for (int64_t now = oldest + 1; now <= h->end; now++) {
        int length = 0;
        for (int64_t place = now; place > oldest && length < LONGEST; place = h->before[place & mask])
            gram[LONGEST - ++length] = h->tokens[place & mask];
        link_entry(h, now, gram + LONGEST, length);
    }
}

/* Append tokens to a request; beyond the capacity they take the places of the oldest. */
void extend(Request *request, const int64_t *tokens, int64_t count)
{
    History *h = request->history;
    const int64_t mask = h->capacity - 1;
    int64_t before = request->last;
    for (int64_t i = 0; i < count; i++) {
        const int64_t now = ++h->end, slot = now & mask;
        h->tokens[slot] = (int32_t)tokens[i];
        h->after[slot] = 0;
        h->before[slot] = before;
        if (before > oldest_of(h)) h->after[before & mask] = now;
        memmove(request->recent, request->recent + 1, sizeof request->recent - sizeof(int32_t));
        request->recent[LONGEST - 1] = (int32_t)tokens[i];
        if (request->length < LONGEST) request->length++;
        link_entry(h, now, request->recent + LONGEST, request->length);
        before = now;
    }
    request->last = before;
}

/* Count how many of the request's latest tokens match up to a place. */
static int match_length(const History *h, const Request *request, int64_t place, int64_t oldest)
{
    const int64_t mask = h->capacity - 1;
    int length = 0;
    while (length < request->length) {
        if (place <= oldest) break;
        if (h->tokens[place & mask] != request->recent[LONGEST - 1 - length]) break;
        length++;
        place = h->before[place & mask];
    }
    return length;
}

/* Find the places of the longest match, latest first; return its length, or 0. The request's own
   last place begins the chains; in another history than its own, their heads do. */
static int find_matches(const History *h, const Request *request, int64_t *places, int *count)
{
    const int64_t mask = h->capacity - 1, oldest = oldest_of(h);
    const int is_own = h == request->history;
    *count = 0;
    if (is_own && request->last <= oldest) return 0;
    for (int n = 0; n < ORDERS; n++) {
        const int order = order_of[n];
        int longest = 0;
        int64_t place;
        if (request->length < order) continue;
        if (is_own) place = h->same[n][request->last & mask];
        else place = h->heads[n][hash_of(request->recent + LONGEST - order, order) & (uint64_t)mask];
        *count = 0;
        for (int i = 0; i < PLACES && place > oldest; i++, place = h->same[n][place & mask]) {
            /* At the end of another running request no token has followed yet. */
            if (!h->after[place & mask]) continue;
            const int length = match_length(h, request, place, oldest);
            if (length > longest) longest = length, *count = 0;
            if (length == longest) places[(*count)++] = place;
        }
        if (longest >= order) return longest;
    }
    *count = 0;
    return 0;
}

/* A product that is rounded before a sum adds it, as in Python: no fused multiply-add. */
static double product(double a, double b)
{
    volatile double rounded = a * b;
    return rounded;
}

static int goes_first(const Candidate *a, const Candidate *b)
{
    if (a->probability != b->probability) return a->probability > b->probability;
    return a->serial < b->serial;
}

static void push(Candidate *heap, int *size, Candidate added)
{
    int at = (*size)++;
    while (at && goes_first(&added, &heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = added;
}

static Candidate pop(Candidate *heap, int *size)
{
    const Candidate first = heap[0], moved = heap[--*size];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= *size) break;
        if (child + 1 < *size && goes_first(&heap[child + 1], &heap[child])) child++;
        if (!goes_first(&heap[child], &moved)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
    return first;
}

/* Find a node's children, most frequent first, then latest first; count the places of each. */
static void look_up(
    const History *h, Node *node, const int64_t *places, int matched, double log_novelty,
    int32_t *counts)
{
    const int64_t mask = h->capacity - 1;
    int64_t found[PLACES];
    int32_t tokens[PLACES], of[PLACES], frequency[PLACES], rank[PLACES], starts[PLACES];
    int total = 0, groups = 0;
    for (int i = 0; i < node->count; i++) {
        const int64_t entry = h->after[places[i] & mask];
        if (!entry) continue;
        const int32_t token = h->tokens[entry & mask];
        int group = 0;
        while (group < groups && tokens[group] != token) group++;
        if (group == groups) tokens[groups] = token, frequency[groups++] = 0;
        frequency[group]++;
        of[total] = group;
        found[total++] = entry;
    }
    node->children = groups;
    if (!total) return;
    node->known = total / (total + exp(log_novelty - product(1.5, log(matched))));
    for (int group = 0; group < groups; group++) { /* insertion keeps the order of equals */
        int at = group;
        for (; at && frequency[rank[at - 1]] < frequency[group]; at--) rank[at] = rank[at - 1];
        rank[at] = group;
    }
    for (int child = 0, start = 0; child < groups; child++) {
        const int group = rank[child];
        node->tokens[child] = tokens[group];
        node->nodes[child] = 0;
        counts[child] = frequency[group];
        starts[group] = start;
        start += frequency[group];
    }
    for (int i = 0; i < total; i++) node->entries[starts[of[i]]++] = found[i];
}

/* Build a request's tree of the nodes whose probability is above least, most probable first. It
   follows the corpus where that matches more tokens than the request's own history. */
static int draft_one(
    const History *corpus, Request *request, const Settings *s, int64_t room, double least,
    Candidate *heap)
{
    const History *h = request->history;
    int64_t places[PLACES], others[PLACES];
    int count, other, size = 0, serial = 0, made = 1;
    int matched = find_matches(h, request, places, &count);
    if (corpus && matched < LONGEST) {
        const int longer = find_matches(corpus, request, others, &other);
        if (longer > matched) {
            matched = longer, count = other, h = corpus;
            memcpy(places, others, sizeof places);
        }
    }
    Node *nodes = request->tree;
    nodes[0].probability = 1.0;
    nodes[0].token = nodes[0].depth = nodes[0].first = nodes[0].children = 0;
    nodes[0].parent = -1;
    nodes[0].count = count;
    while (made < room) {
        Node *node = &nodes[made - 1];
        if (node->depth < s->num_steps) {
            int32_t counts[PLACES];
            const int64_t *own = made == 1 ? places : nodes[node->parent].entries + node->first;
            look_up(h, node, own, matched + node->depth, request->log, counts);
            int total = 0, first = 0;
            for (int child = 0; child < node->children; child++) total += counts[child];
            for (int child = 0; child < node->children && child < s->topk; child++) {
                const double share = node->probability * node->known / total;
                const Candidate added = {
                    share * counts[child], ++serial, made - 1, child, first, counts[child]};
                push(heap, &size, added);
                first += counts[child];
            }
        }
        if (!size) break;
        const Candidate best = pop(heap, &size);
        if (best.probability <= least) break;
        Node *parent = &nodes[best.parent], *added = &nodes[made];
        parent->nodes[best.child] = made++;
        added->probability = best.probability;
        added->token = parent->tokens[best.child];
        added->parent = best.parent;
        added->depth = parent->depth + 1;
        added->first = best.first;
        added->count = best.count;
        added->children = 0;
    }
    return made;
}

/* Draft a tree for each request; a null pointer gets the root alone. corpus may be null.
   rooms, widths: [bs]; heap: room for PLACES candidates of each node; tokens, parents:
   [bs, num_draft_tokens], written whole: 0 at the root and after a request's width; scores alike,
   -inf after a request's width;
   gains: [num_draft_tokens], the expected number of accepted nodes at each depth. */
void draft(
    const History *corpus, const Settings *s, Request *const *requests, const int64_t *rooms, int64_t bs,
    double least, Candidate *heap, int64_t *tokens, int64_t *parents, float *scores, int64_t *widths,
    double *gains, Summary *sum)
{
    const int64_t width = s->num_draft_tokens;
    memset(sum, 0, sizeof *sum);
    memset(gains, 0, sizeof(double) * width);
    memset(tokens, 0, sizeof(int64_t) * bs * width);
    memset(parents, 0, sizeof(int64_t) * bs * width);
    for (int64_t i = 0; i < bs * width; i++) scores[i] = i % width ? -INFINITY : 0;
    for (int64_t row = 0; row < bs; row++) {
        Request *request = requests[row];
        parents[row * width] = -1;
        widths[row] = 1;
        if (!request) continue;
        const int64_t room = rooms[row] < width ? rooms[row] : width;
        const int made = request->nodes = draft_one(corpus, request, s, room, least, heap);
        const Node *nodes = request->tree;
        for (int i = 1; i < made; i++) {
            tokens[row * width + i] = nodes[i].token;
            parents[row * width + i] = nodes[i].parent;
            scores[row * width + i] =
                (float)log(nodes[i].probability / nodes[nodes[i].parent].probability);
            gains[nodes[i].depth] += nodes[i].probability;
            if (nodes[i].depth > sum->depth) sum->depth = nodes[i].depth;
            if (nodes[i].parent != i - 1) sum->branches = 1;
        }
        sum->nodes += made - 1;
        widths[row] = made;
    }
}

/* Learn from a request's next tokens, whether they were proposed or not. */
static void learn(Request *request, const Settings *s, const int64_t *tokens, int64_t count)
{
    int at = request->nodes ? 0 : -1;
    for (int64_t i = 0; i < count && at >= 0; i++) {
        const Node *node = &request->tree[at];
        if (!node->children) break;
        int child = 0;
        while (child < node->children && node->tokens[child] != tokens[i]) child++;
        const int was_known = child < node->children;
        const double moved = request->log + product(s->rate, node->known - was_known);
        request->log = fmin(fmax(moved, s->least_log), s->most_log);
        at = was_known && node->nodes[child] ? node->nodes[child] : -1;
    }
    request->nodes = 0;
}

/* Learn from the new tokens of each request, and append them. Return bs; or, before its history has
   to grow, the row of a request: call again from that row on, when it has grown or is full.
   tokens: [bs, width]; counts: [bs], the new tokens of each row; a null pointer: the request has
   ended. */
int64_t observe(
    const Settings *s, Request *const *requests, const int64_t *tokens, int64_t width,
    const int64_t *counts, int64_t bs, int64_t row)
{
    for (; row < bs; row++) {
        Request *request = requests[row];
        if (!request) continue;
        const int64_t count = counts[row] < width ? counts[row] : width;
        const History *h = request->history;
        if (!h->full && h->end - oldest_of(h) + count > h->capacity) return row;
        learn(request, s, tokens + row * width, count);
        extend(request, tokens + row * width, count);
    }
    return bs;
}

/* The growth of other algorithms' drafts: path_continuation.py, whose nodes it gives in their order.
   Scores may be rounded otherwise. */

#define FIELDS 3
#define PATHS 3
#define SHORTEST 2
#define LEAST_SCORE -1e4f

typedef struct {
    int32_t token, parent, depth;
    float score, chance;               /* chance: the sum of the scores from the root on */
} Grown;

typedef struct {
    int64_t steps, depth;              /* tokens that a path is continued by; the greatest depth */
    const int32_t *text;
    int64_t end;                       /* of the text: its root */
    float novelty;
} Growth;

static float float_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Add the host's nodes which are not there; return the number of all. */
static int merge(Grown *nodes, int made, const int32_t *own, int64_t own_nodes, int count)
{
    int32_t places[own_nodes];
    places[0] = 0;
    for (int i = 1; i < count; i++) {
        const int32_t token = own[i], above = places[own[own_nodes + i]];
        const float score = float_of(own[2 * own_nodes + i]);
        int at = 1;
        while (at < made && (nodes[at].parent != above || nodes[at].token != token)) at++;
        if (at < made) nodes[at].score = fmaxf(nodes[at].score, score);
        else nodes[made++] = (Grown){token, above, 0, score, 0};
        places[i] = at;
    }
    return made;
}

/* Set depths and chances. A node of an ended path, or of none, has no parent from now on. */
static void survive(Grown *nodes, int made)
{
    for (int i = 1; i < made; i++) {
        Grown *node = &nodes[i];
        const Grown *above = node->parent >= 0 && node->parent < i ? &nodes[node->parent] : 0;
        if (above && above->chance > -INFINITY && node->score > LEAST_SCORE) {
            node->depth = above->depth + 1;
            node->chance = above->chance + fminf(node->score, 0);
        } else *node = (Grown){0, -1, 0, -INFINITY, -INFINITY};
    }
}

/* Find the place where most tokens up to a node are matched: of equal ones the latest that has
   enough text after it. Return how many are matched. */
static int find_path(const Growth *g, const Grown *nodes, int at, int64_t *found)
{
    int32_t wanted[nodes[at].depth + LONGEST];
    int count = 0, longest = 0, room = 0;
    for (; at; at = nodes[at].parent) wanted[count++] = nodes[at].token;
    for (int64_t i = g->end; i >= 0 && i > g->end - LONGEST; i--) wanted[count++] = g->text[i];
    for (int64_t place = g->end - 1; place >= 0; place--) {
        int length = 0;
        while (length < count && length <= place && g->text[place - length] == wanted[length]) length++;
        const int has_room = place + g->steps <= g->end;
        if (length > longest || (length == longest && has_room > room))
            longest = length, room = has_room, *found = place;
    }
    return longest;
}

static float score_of(float novelty, int matched)
{
    return -log1pf(novelty / (matched * sqrtf(matched)));
}

/* Append what followed the likeliest paths; return the number of all nodes. */
static int continue_paths(const Growth *g, Grown *nodes, int made)
{
    const int count = made;
    int matched[count];
    int64_t places[count];
    float likely[count];
    for (int i = 0; i < count; i++) {
        likely[i] = -INFINITY;
        if (!(nodes[i].chance > -INFINITY) || nodes[i].depth >= g->depth) continue;
        matched[i] = find_path(g, nodes, i, &places[i]);
        if (matched[i] < SHORTEST) continue;
        int child = 1;
        while (child < count && (nodes[child].parent != i || nodes[child].token != g->text[places[i] + 1]))
            child++;
        if (child == count) likely[i] = nodes[i].chance + score_of(g->novelty, matched[i]);
    }
    for (int path = 0; path < PATHS; path++) {
        int above = 0;
        for (int i = 1; i < count; i++) if (likely[i] > likely[above]) above = i;
        if (!(likely[above] > -INFINITY)) break;
        const int64_t place = places[above];
        const int length = matched[above];
        likely[above] = -INFINITY;
        for (int step = 1; step <= g->steps && place + step <= g->end; step++) {
            if (nodes[above].depth == g->depth) break;
            const float score = score_of(g->novelty, length + step - 1);
            nodes[made] = (Grown){
                g->text[place + step], above, nodes[above].depth + 1, score, nodes[above].chance + score};
            above = made++;
        }
    }
    return made;
}

/* Write the likeliest nodes, of equal ones the first, and absent nodes up to most. */
static void keep(const Grown *nodes, int made, int most, int64_t *tokens, int64_t *parents, float *scores)
{
    int order[made], places[made];
    for (int i = 0; i < made; i++) {
        int at = i;
        for (; at && nodes[order[at - 1]].chance < nodes[i].chance; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    for (int at = 0; at < made; at++) places[order[at]] = at;
    for (int at = 0; at < most; at++) {
        const Grown *node = at < made ? &nodes[order[at]] : 0;
        tokens[at] = node ? node->token : 0;
        parents[at] = node && node->parent >= 0 ? places[node->parent] : -1;
        scores[at] = node ? node->score : -INFINITY;
    }
}

/* Grow drafts as grow_in_torch does, with whose arguments and results these are; parents and scores
   may be null. All are contiguous: texts [rows, length], tokens [bs, width], given
   [bs, FIELDS * (own_nodes + 1)], what is written [bs, most]. */
void grow(
    int32_t *texts, int64_t length, const int64_t *rows, const int64_t *ends, const int32_t *given,
    int64_t own_nodes, const int64_t *tokens, const int64_t *parents, const float *scores, int64_t bs,
    int64_t width, int64_t steps, int64_t depth, int64_t most, int64_t *new_tokens,
    int64_t *new_parents, float *new_scores)
{
    Grown nodes[width + own_nodes + PATHS * steps];
    for (int64_t row = 0; row < bs; row++) {
        const int32_t *own = given + row * FIELDS * (own_nodes + 1), *told = own + FIELDS * own_nodes;
        int32_t *text = texts + rows[row] * length;
        const int64_t first = row * width, end = ends[row];
        if (end < length) text[end] = (int32_t)tokens[first];
        for (int i = 0; i < told[1]; i++)
            nodes[i] = (Grown){
                (int32_t)tokens[first + i], parents ? (int32_t)parents[first + i] : i - 1, 0,
                scores ? scores[first + i] : 0, 0};
        nodes[0] = (Grown){(int32_t)tokens[first], -1, 0, 0, 0};
        int made = merge(nodes, told[1], own, own_nodes, told[0]);
        survive(nodes, made);
        const Growth growth = {steps, depth, text, end, float_of(told[2])};
        if (steps && growth.novelty < INFINITY && end < length)
            made = continue_paths(&growth, nodes, made);
        const int64_t at = row * most;
        keep(nodes, made, (int)most, new_tokens + at, new_parents + at, new_scores + at);
    }
}

/* Write tokens [bs, columns] after the positions ends of texts [rows, length]. */
void write_tokens(
    int32_t *texts, int64_t length, const int64_t *rows, const int64_t *ends, const int64_t *tokens,
    int64_t bs, int64_t columns)
{
    for (int64_t row = 0; row < bs; row++)
        for (int64_t i = 0; i < columns && ends[row] + 1 + i < length; i++)
            texts[rows[row] * length + ends[row] + 1 + i] = (int32_t)tokens[row * columns + i];
}
