/* best_plan.py in C. The Python code is the reference: plans are the same, but for sums that differ
   in their last bits. compiled_plans.py compiles this file, and declares its structure and
   functions. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_ALGORITHMS 16
#define COSTS 5  /* of a drafter: any, depth, request, node, some */
#define LEAST 6
#define LIMITS 11
#define MOST_SETS 6
#define ROUNDING 1e-6

static const double least[LEAST] = {1e-300, 0.08, 0.25, 0.45, 0.65, 0.85};
static const int32_t every_limit[LIMITS - 1] = {1, 2, 3, 4, 5, 6, 8, 11, 16, 32};

typedef struct {
    int64_t bs, algorithms, deepest;
    int64_t curve_rows;              /* places of curve */
    const double *survival;          /* [bs, algorithms, deepest] */
    const double *curve;             /* [curve_rows] */
    const double *drafters;          /* [algorithms, COSTS] */
    const double *filled;            /* [algorithms] */
    int64_t waiting;                 /* a bit for each algorithm that waits */
    double shown, ragged;
} Step;

typedef struct {
    double tokens, seconds;
} Worth;

const int64_t layout[] = {
    MOST_ALGORITHMS, COSTS, LEAST, LIMITS, MOST_SETS, sizeof(Step), sizeof(Worth),
};

/* What an algorithm drafts in a plan. */
typedef struct {
    int64_t requests, nodes, deepest;
} Drafts;

typedef struct {
    double *gains;                   /* [bs, algorithms, deepest + 1] tokens up to each depth */
    int32_t *reach;                  /* [bs, algorithms, LEAST] how deep nodes above survivals go */
    int32_t *sets;                   /* [sets, bs] who may draft */
} Nodes;

/* Seconds of the target's pass over so many nodes and the roots. */
static double target(const Step *s, double nodes)
{
    const int64_t rows = s->bs + (int64_t)ceil(nodes - ROUNDING);
    return s->curve[rows < s->curve_rows ? rows : s->curve_rows - 1];
}

static double seconds_of(const Step *s, const Drafts *drafts, int is_ragged)
{
    double sides[2] = {0, 0}, nodes = 0;
    for (int a = 0; a < s->algorithms; a++) {
        const double *cost = s->drafters + a * COSTS, drafted = s->filled[a] * drafts[a].nodes;
        const int64_t requests = drafts[a].requests;
        double own = cost[1] * drafts[a].deepest + cost[2] * requests + cost[3] * drafted;
        if (drafts[a].deepest > 0) own += cost[0];
        if (requests > 0 && requests < s->bs) own += cost[4];
        sides[s->waiting >> a & 1] += own;
        nodes += drafted;
    }
    const double longer = fmax(sides[0], sides[1]), shorter = fmin(sides[0], sides[1]);
    return target(s, nodes) + longer + s->shown * shorter + (is_ragged ? s->ragged : 0);
}

/* Tokens and seconds of who drafts how deep, -1: nobody. */
void price(const Step *s, const int64_t *who, const int64_t *depths, Worth *worth)
{
    Drafts drafts[MOST_ALGORITHMS] = {{0}};
    int64_t low = INT64_MAX, high = 0;
    double tokens = (double)s->bs;
    for (int64_t n = 0; n < s->bs; n++) {
        const int64_t depth = depths[n], a = who[n];
        if (depth < low) low = depth;
        if (depth > high) high = depth;
        if (a < 0 || depth <= 0) continue;
        const double *survival = s->survival + (n * s->algorithms + a) * s->deepest;
        for (int64_t d = 0; d < depth && d < s->deepest; d++) tokens += survival[d];
        drafts[a].requests++;
        drafts[a].nodes += depth;
        if (depth > drafts[a].deepest) drafts[a].deepest = depth;
    }
    worth->tokens = tokens;
    worth->seconds = seconds_of(s, drafts, low != high);
}

/* Sum up what is expected of each request's nodes, and count them. */
static void count_nodes(const Step *s, const Nodes *nodes)
{
    for (int64_t row = 0; row < s->bs * s->algorithms; row++) {
        const double *survival = s->survival + row * s->deepest;
        double *gains = nodes->gains + row * (s->deepest + 1), sum = gains[0] = 0;
        int32_t *reach = nodes->reach + row * LEAST;
        memset(reach, 0, LEAST * sizeof(int32_t));
        for (int64_t d = 0; d < s->deepest; d++) {
            gains[d + 1] = sum += survival[d];
            for (int t = 0; t < LEAST && survival[d] >= least[t]; t++) reach[t]++;
        }
    }
}

/* Write which algorithm of a set brings most for each request, beyond its cost. */
static void assign(const Step *s, const Nodes *nodes, const int *set, int size, double rate,
                   int32_t *who)
{
    const int64_t spare = s->curve_rows - 1 - s->bs, deep = s->deepest < 4 ? s->deepest : 4;
    const int64_t rows = s->bs * deep < spare ? s->bs * deep : spare;
    const double row = (s->curve[s->bs + rows] - s->curve[s->bs]) / rows;
    for (int64_t n = 0; n < s->bs; n++) {
        double most = -INFINITY;
        for (int k = 0; k < size; k++) {
            const int a = set[k];
            const double *cost = s->drafters + a * COSTS;
            const double *gains = nodes->gains + (n * s->algorithms + a) * (s->deepest + 1);
            const double price = rate * (row + cost[3]) * s->filled[a];
            double own = -INFINITY;
            for (int64_t d = 1; d <= s->deepest; d++) own = fmax(own, gains[d] - price * d);
            own -= rate * cost[2];
            if (own > most || k == 0) most = own, who[n] = a;
        }
    }
}

/* Write who may draft in each set of algorithms that can, first all, then those with one less, …,
   last each alone; return how many sets there are. */
static int assign_all(const Step *s, const Nodes *nodes, double rate)
{
    int able[MOST_ALGORITHMS], chosen[MOST_ALGORITHMS], set[MOST_ALGORITHMS], count = 0, found = 0;
    for (int a = 0; a < s->algorithms; a++) {
        double most = 0;
        for (int64_t n = 0; n < s->bs; n++)
            most = fmax(most, s->survival[(n * s->algorithms + a) * s->deepest]);
        if (most > 0) able[count++] = a;
    }
    for (int size = count; size > 1 && found < MOST_SETS - 1; size--) {
        for (int k = 0; k < size; k++) chosen[k] = k;
        for (int k = 0; k >= 0 && found < MOST_SETS - 1;) {
            for (int i = 0; i < size; i++) set[i] = able[chosen[i]];
            assign(s, nodes, set, size, rate, nodes->sets + found++ * s->bs);
            for (k = size - 1; k >= 0 && chosen[k] == count - size + k; k--) continue;
            if (k >= 0) chosen[k]++;
            for (int i = k + 1; k >= 0 && i < size; i++) chosen[i] = chosen[i - 1] + 1;
        }
    }
    for (int k = 0; k < count; k++, found++)
        for (int64_t n = 0; n < s->bs; n++) nodes->sets[found * s->bs + n] = able[k];
    return found;
}

/* Sum up the nodes of one set above one survival, no deeper than each of the limits. */
static void sum_up(const Step *s, const Nodes *nodes, const int32_t *who, int t,
                   const int32_t *limits, int count, Drafts (*drafts)[MOST_ALGORITHMS],
                   double *gained, int32_t *ends)
{
    memset(drafts, 0, count * sizeof(*drafts));
    memset(gained, 0, count * sizeof(*gained));
    ends[0] = INT32_MAX, ends[1] = 0;
    for (int64_t n = 0; n < s->bs; n++) {
        const int64_t row = n * s->algorithms + who[n];
        const int32_t reach = nodes->reach[row * LEAST + t];
        const double *gains = nodes->gains + row * (s->deepest + 1);
        if (reach < ends[0]) ends[0] = reach;
        if (reach > ends[1]) ends[1] = reach;
        if (!reach) continue;
        for (int l = 0; l < count; l++) {
            const int32_t depth = reach < limits[l] ? reach : limits[l];
            Drafts *own = &drafts[l][who[n]];
            own->requests++;
            own->nodes += depth;
            if (depth > own->deepest) own->deepest = depth;
            gained[l] += gains[depth];
        }
    }
}

/* Sort places by their keys, descending; equal ones stay in their order. */
static void sort_by(uint16_t *keys, int32_t *places, int32_t *other, int64_t count)
{
    for (int shift = 0; shift < 16; shift += 8) {
        int64_t starts[257] = {0};
        for (int64_t i = 0; i < count; i++) starts[256 - (keys[places[i]] >> shift & 255)]++;
        for (int i = 1; i < 257; i++) starts[i] += starts[i - 1];
        for (int64_t i = 0; i < count; i++)
            other[starts[255 - (keys[places[i]] >> shift & 255)]++] = places[i];
        memcpy(places, other, count * sizeof(*places));
    }
}

/* Give a plan as many nodes in the order of survival as are best, no deeper than it is. Drafters
   draft as deep as before, so that only the target's rows change. */
static void mend(const Step *s, int64_t *who, int64_t *depths, Worth *worth, void *memory)
{
    int64_t limit = 0, low = INT64_MAX, count = 0;
    double drafted = 0;
    for (int64_t n = 0; n < s->bs; n++) {
        if (depths[n] > limit) limit = depths[n];
        if (depths[n] < low) low = depths[n];
        if (depths[n]) drafted += depths[n] * s->filled[who[n]];
    }
    if (!limit) return;
    const double others = worth->seconds - target(s, drafted) + (limit == low ? s->ragged : 0);
    int32_t *places = memory, *other = places + s->bs * limit;
    uint16_t *keys = (uint16_t *)(other + s->bs * limit);
    for (int64_t n = 0; n < s->bs; n++)
        for (int64_t d = 0; d < limit && who[n] >= 0; d++) {
            const double survival = s->survival[(n * s->algorithms + who[n]) * s->deepest + d];
            if (survival == 0) continue;
            keys[n * limit + d] = (uint16_t)(30000 * survival);
            places[count++] = (int32_t)(n * limit + d);
        }
    sort_by(keys, places, other, count);
    double nodes = 0, tokens = (double)s->bs, most = 0;
    Worth best = *worth;
    int64_t taken = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t n = places[i] / limit, d = places[i] % limit;
        nodes += s->filled[who[n]];
        tokens += s->survival[(n * s->algorithms + who[n]) * s->deepest + d];
        const double seconds = target(s, nodes) + others;
        if (tokens / seconds > most) {
            most = tokens / seconds;
            best.tokens = tokens, best.seconds = seconds, taken = i + 1;
        }
    }
    if (most <= worth->tokens / worth->seconds * (1 + 1e-9)) return;
    *worth = best;
    memset(depths, 0, s->bs * sizeof(*depths));
    for (int64_t i = 0; i < taken; i++) depths[places[i] / limit]++;
    for (int64_t n = 0; n < s->bs; n++)
        if (!depths[n]) who[n] = -1;
}

/* Find the plan with the most tokens a second of those that draft. Return 1; 0 if none may be
   drafted for, -1 without memory. */
int64_t best(const Step *s, double rate, int64_t *who, int64_t *depths, Worth *worth)
{
    const int64_t rows = s->bs * s->algorithms;
    const size_t gains = rows * (s->deepest + 1) * sizeof(double);
    const size_t reach = rows * LEAST * sizeof(int32_t);
    const size_t sets = (MOST_SETS + MOST_ALGORITHMS) * s->bs * sizeof(int32_t);
    const size_t order = s->bs * s->deepest * (2 * sizeof(int32_t) + sizeof(uint16_t));
    char *memory = malloc(gains + reach + sets + order);
    if (memory == NULL) return -1;
    const Nodes nodes = {
        (double *)memory, (int32_t *)(memory + gains), (int32_t *)(memory + gains + reach),
    };
    count_nodes(s, &nodes);
    const int found = assign_all(s, &nodes, rate);
    int32_t limits[LIMITS];
    int count = 0;
    for (; count < LIMITS - 1 && every_limit[count] < s->deepest; count++)
        limits[count] = every_limit[count];
    limits[count++] = (int32_t)s->deepest;
    Drafts drafts[LIMITS][MOST_ALGORITHMS];
    double gained[LIMITS], most = -INFINITY;
    int32_t ends[2], of = 0, above = 0, limit = 0;
    for (int set = 0; set < found; set++)
        for (int t = 0; t < LEAST; t++) {
            sum_up(s, &nodes, nodes.sets + set * s->bs, t, limits, count, drafts, gained, ends);
            for (int l = 0; l < count; l++) {
                const int is_ragged = ends[0] < limits[l] && ends[0] != ends[1];
                const double seconds = seconds_of(s, drafts[l], is_ragged);
                const double tokens = s->bs + gained[l];
                if (tokens / seconds <= most) continue;
                most = tokens / seconds, worth->tokens = tokens, worth->seconds = seconds;
                of = set, above = t, limit = limits[l];
            }
        }
    for (int64_t n = 0; n < s->bs && found; n++) {
        const int32_t a = nodes.sets[of * s->bs + n];
        const int32_t reach = nodes.reach[(n * s->algorithms + a) * LEAST + above];
        depths[n] = reach < limit ? reach : limit;
        who[n] = depths[n] ? a : -1;
    }
    if (found) mend(s, who, depths, worth, memory + gains + reach + sets);
    free(memory);
    return found > 0;
}
