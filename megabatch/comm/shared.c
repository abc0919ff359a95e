/* Collectives between the ranks of one host through memory that all of them have mapped.

   A lane is used for one collective at a time. Every rank owns a slot in it, of two halves. A collective goes in blocks:
   each rank writes into one half of its slot, all meet, each reads what it needs from the slots of the others. The next
   block uses the other half. Whoever writes block n has met the others at block n - 1, which they reach only after they
   have read block n - 2: so nobody overwrites what is still to be read, and one meeting per block is enough.

   Sums are made in the order, and with the roundings, of the Gloo primitives of the same pattern: the same bits.

   A wait spins for a moment, then sleeps in the kernel. It wakes now and then to see whether the ranks that are missing
   still live: their process file descriptors tell, also of a process that nobody has buried yet. */

#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LINE = 64, BLOCK = 1024, MOST_RANKS = 256 };
enum { INT32, FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum { DIRECT, RING, CHAIN, HALVING };
static const int64_t LOOK_NS = 20 * 1000 * 1000;

/* One cache line per rank: which block it has reached, and what it reduces there. */
struct record {
  _Atomic uint32_t block;
  uint32_t kind[2];
};

/* As `_Lane` in shared_memory.py. arrivals: of all ranks, at all blocks; sleepers wait for it to grow. */
struct lane {
  _Atomic uint32_t *arrivals;
  _Atomic uint32_t *sleepers;
  char *records;
  char *slots;
  _Atomic uint32_t *hung_up;
  const int32_t *processes;
  int64_t half_bytes, timeout_ns;
  int32_t size, position, spins;
};

static struct record *record_of(const struct lane *lane, int rank) {
  return (struct record *)(lane->records + (int64_t)LINE * rank);
}

static char *slot_of(const struct lane *lane, int rank, uint32_t block) {
  return lane->slots + (2 * (int64_t)rank + (block & 1)) * lane->half_bytes;
}

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int has_reached(_Atomic uint32_t *counter, uint32_t target) {
  return (int32_t)(atomic_load(counter) - target) >= 0;
}

/* Number + 1 of the first rank that has not reached a block. */
static int32_t first_missing(const struct lane *lane, uint32_t block) {
  for (int rank = 0; rank < lane->size; rank++)
    if (rank != lane->position && !has_reached(&record_of(lane, rank)->block, block))
      return rank + 1;
  return (lane->position + 1) % lane->size + 1;
}

/* Number + 1 of a rank that has not come and never will, or 0. Where this rank itself hung up, nobody will come. */
static int32_t find_lost(const struct lane *lane, uint32_t block) {
  if (atomic_load(&lane->hung_up[lane->position]))
    return first_missing(lane, block);
  for (int rank = 0; rank < lane->size; rank++) {
    if (rank == lane->position || has_reached(&record_of(lane, rank)->block, block))
      continue;
    struct pollfd process = {.fd = lane->processes[rank], .events = POLLIN};
    int is_gone = atomic_load(&lane->hung_up[rank]) || (poll(&process, 1, 0) == 1 && (process.revents & POLLIN));
    /* It may have come just before it went. */
    if (is_gone && !has_reached(&record_of(lane, rank)->block, block))
      return rank + 1;
  }
  return 0;
}

static int32_t sleep_until(const struct lane *lane, uint32_t target, uint32_t block) {
  int64_t deadline = now_ns() + lane->timeout_ns;
  int32_t result = 0;
  atomic_fetch_add(lane->sleepers, 1);
  while (!has_reached(lane->arrivals, target)) {
    if ((result = find_lost(lane, block)) != 0)
      break;
    int64_t left = deadline - now_ns();
    if (left <= 0) {
      result = -first_missing(lane, block);
      break;
    }
    uint32_t seen = atomic_load(lane->arrivals);
    if ((int32_t)(seen - target) >= 0)
      break;
    struct timespec look = {.tv_nsec = left < LOOK_NS ? left : LOOK_NS};
    syscall(SYS_futex, lane->arrivals, FUTEX_WAIT, seen, &look, NULL, 0);
  }
  atomic_fetch_sub(lane->sleepers, 1);
  return result;
}

/* What every collective here returns: 0, or number + 1 of a rank that is gone, or less than 0 for one that is late. */
static int32_t meet(const struct lane *lane, uint32_t kind) {
  struct record *own = record_of(lane, lane->position);
  uint32_t block = atomic_load(&own->block) + 1, target = block * (uint32_t)lane->size;
  if (atomic_load(&lane->hung_up[lane->position]))
    return first_missing(lane, block);
  own->kind[block & 1] = kind;
  atomic_store(&own->block, block);
  if (atomic_fetch_add(lane->arrivals, 1) + 1 == target) {
    if (atomic_load(lane->sleepers))
      syscall(SYS_futex, lane->arrivals, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  } else {
    int spins = lane->spins;
    while (!has_reached(lane->arrivals, target) && spins-- > 0) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    int32_t lost = has_reached(lane->arrivals, target) ? 0 : sleep_until(lane, target, block);
    if (lost)
      return lost;
  }
  for (int rank = 0; rank < lane->size; rank++)
    if (record_of(lane, rank)->kind[block & 1] != kind)
      return rank + 1;
  return 0;
}

static uint32_t next_block(const struct lane *lane) {
  return atomic_load(&record_of(lane, lane->position)->block) + 1;
}

void megabatch_hang_up(_Atomic uint32_t *hung_up, _Atomic uint32_t *arrivals, int64_t stride_bytes, int64_t lanes) {
  atomic_store(hung_up, 1);
  for (int64_t lane = 0; lane < lanes; lane++)
    syscall(SYS_futex, (char *)arrivals + lane * stride_bytes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sums of blocks that fit the first cache. Halves are widened to float32 and rounded as the pattern says. */

union block {
  uint32_t int32[BLOCK];
  float float32[BLOCK];
  double float64[BLOCK];
};

#define DEFINE_ADD(NAME, TYPE)                                                                                         \
  static void NAME(void *restrict total, const void *restrict term, int count) {                                       \
    TYPE *restrict out = total;                                                                                        \
    const TYPE *restrict in = term;                                                                                    \
    for (int i = 0; i < count; i++)                                                                                    \
      out[i] += in[i];                                                                                                 \
  }
DEFINE_ADD(add_int32, uint32_t)
DEFINE_ADD(add_float32, float)
DEFINE_ADD(add_float64, double)

static void widen_bfloat16(float *restrict out, const uint16_t *restrict in, int count) {
  for (int i = 0; i < count; i++) {
    uint32_t bits = (uint32_t)in[i] << 16;
    memcpy(out + i, &bits, 4);
  }
}

static void narrow_bfloat16(uint16_t *restrict out, const float *restrict in, int count) {
  for (int i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, in + i, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out[i] = (uint16_t)(in[i] == in[i] ? rounded : 0x7fc0);
  }
}

#if defined(__x86_64__)
int32_t megabatch_has_float16(void) { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0; }

__attribute__((target("avx2,f16c"))) static void widen_float16(float *out, const uint16_t *in, int count) {
  int i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
  for (; i < count; i++)
    out[i] = _cvtsh_ss(in[i]);
}

__attribute__((target("avx2,f16c"))) static void narrow_float16(uint16_t *out, const float *in, int count) {
  int i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; i++)
    out[i] = _cvtss_sh(in[i], _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__aarch64__)
int32_t megabatch_has_float16(void) { return 1; }

static void widen_float16(float *out, const uint16_t *in, int count) {
  for (int i = 0; i < count; i++)
    out[i] = ((const __fp16 *)in)[i];
}

static void narrow_float16(uint16_t *out, const float *in, int count) {
  for (int i = 0; i < count; i++)
    ((__fp16 *)out)[i] = in[i];
}
#else
int32_t megabatch_has_float16(void) { return 0; }
static void widen_float16(float *out, const uint16_t *in, int count) { (void)out, (void)in, (void)count; }
static void narrow_float16(uint16_t *out, const float *in, int count) { (void)out, (void)in, (void)count; }
#endif

static int item_bytes(int dtype) { return dtype == FLOAT64 ? 8 : dtype >= FLOAT16 ? 2 : 4; }

static void load(int dtype, union block *total, const void *term, int count) {
  if (dtype == FLOAT16)
    widen_float16(total->float32, term, count);
  else if (dtype == BFLOAT16)
    widen_bfloat16(total->float32, term, count);
  else
    memcpy(total, term, (size_t)count * item_bytes(dtype));
}

static void store(int dtype, void *out, const union block *total, int count) {
  if (dtype == FLOAT16)
    narrow_float16(out, total->float32, count);
  else if (dtype == BFLOAT16)
    narrow_bfloat16(out, total->float32, count);
  else
    memcpy(out, total, (size_t)count * item_bytes(dtype));
}

static void add(int dtype, union block *total, const void *term, int count, int rounds) {
  if (dtype == INT32)
    add_int32(total, term, count);
  else if (dtype == FLOAT32)
    add_float32(total, term, count);
  else if (dtype == FLOAT64)
    add_float64(total, term, count);
  else {
    union block wide;
    load(dtype, &wide, term, count);
    add_float32(total, &wide, count);
    if (rounds) {
      uint16_t narrow[BLOCK];
      store(dtype, narrow, total, count);
      load(dtype, total, narrow, count);
    }
  }
}

/* As recursive halving adds: pairs at half the distance of all, then pairs of pairs. The first `extra` places of the
   power of two `core` stand for two ranks each. */
static void add_tree(int dtype, union block *total, char **terms, int place, int span, int core, int extra, int count) {
  if (span == core) {
    load(dtype, total, terms[place < extra ? 2 * place : place + extra], count);
    if (place < extra)
      add(dtype, total, terms[2 * place + 1], count, 1);
    return;
  }
  union block half;
  char narrow[8 * BLOCK];
  add_tree(dtype, total, terms, place, 2 * span, core, extra, count);
  add_tree(dtype, &half, terms, place + span, 2 * span, core, extra, count);
  store(dtype, narrow, &half, count);
  add(dtype, total, narrow, count, 1);
}

/* out = sum of terms[rank], for all ranks; out may be one of the terms. `owner`: where a ring ends. */
static void sum(int dtype, int order, char *out, char *const *terms, int size, int owner, int64_t count) {
  int bytes = item_bytes(dtype), core = 1;
  while (2 * core <= size)
    core *= 2;
  for (int64_t start = 0; start < count; start += BLOCK) {
    int length = (int)(count - start < BLOCK ? count - start : BLOCK);
    char *here[MOST_RANKS];
    for (int rank = 0; rank < size; rank++)
      here[rank] = terms[rank] + start * bytes;
    union block total;
    if (order == HALVING)
      add_tree(dtype, &total, here, 0, 1, core, size - core, length);
    else
      for (int i = 0; i < size; i++) {
        int rank = order == RING ? (owner + 1 + i) % size : order == CHAIN ? size - 1 - i : i;
        if (i == 0)
          load(dtype, &total, here[rank], length);
        else
          add(dtype, &total, here[rank], length, order != DIRECT);
      }
    store(dtype, out + start * bytes, &total, length);
  }
}

static int64_t bound(int64_t count, int size, int rank) { return count * rank / size; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int32_t megabatch_reduce_scatter(const struct lane *lane, char *part, int64_t count, int dtype, int order, uint32_t kind) {
  int size = lane->size, me = lane->position, bytes = item_bytes(dtype);
  int64_t piece = lane->half_bytes / (size - 1) / bytes, longest = (count + size - 1) / size;
  for (int64_t done = 0; done < longest; done += piece) {
    uint32_t block = next_block(lane);
    /* A slot holds a piece for each of the others, in order. */
    char *slot = slot_of(lane, me, block), *terms[MOST_RANKS];
    for (int i = 1; i < size; i++) {
      int rank = (me + i) % size;
      int64_t low = bound(count, size, rank) + done, high = bound(count, size, rank + 1);
      if (low < high)
        memcpy(slot + (rank - (rank > me)) * piece * bytes, part + low * bytes, least(piece, high - low) * bytes);
    }
    int32_t lost = meet(lane, kind);
    if (lost)
      return lost;
    int64_t low = bound(count, size, me) + done, high = bound(count, size, me + 1);
    for (int rank = 0; rank < size; rank++)
      terms[rank] = slot_of(lane, rank, block) + (me - (me > rank)) * piece * bytes;
    terms[me] = part + low * bytes;
    sum(dtype, order, part + low * bytes, terms, size, me, least(piece, high - low));
  }
  return 0;
}

int32_t megabatch_all_gather(const struct lane *lane, char *part, int64_t count, int dtype, uint32_t kind) {
  int size = lane->size, me = lane->position, bytes = item_bytes(dtype);
  int64_t piece = lane->half_bytes / bytes, longest = (count + size - 1) / size;
  for (int64_t done = 0; done < longest; done += piece) {
    uint32_t block = next_block(lane);
    for (int i = 0; i < size; i++) {
      int rank = (me + i) % size;
      int64_t low = bound(count, size, rank) + done, high = bound(count, size, rank + 1);
      int64_t length = low < high ? least(piece, high - low) * bytes : 0;
      if (i == 0) {
        memcpy(slot_of(lane, me, block), part + low * bytes, length);
        int32_t lost = meet(lane, kind);
        if (lost)
          return lost;
      } else
        memcpy(part + low * bytes, slot_of(lane, rank, block), length);
    }
  }
  return 0;
}

/* All ranks hold the sum, or rank 0 alone. */
int32_t megabatch_reduce(const struct lane *lane, char *part, int64_t count, int dtype, int order, int everywhere,
                         uint32_t kind) {
  int size = lane->size, me = lane->position, bytes = item_bytes(dtype);
  int64_t piece = lane->half_bytes / bytes;
  for (int64_t done = 0; done < count; done += piece) {
    uint32_t block = next_block(lane);
    int64_t length = least(piece, count - done);
    char *own = part + done * bytes, *terms[MOST_RANKS];
    if (everywhere || me > 0)
      memcpy(slot_of(lane, me, block), own, length * bytes);
    int32_t lost = meet(lane, kind);
    if (lost)
      return lost;
    for (int rank = 0; rank < size; rank++)
      terms[rank] = rank == me ? own : slot_of(lane, rank, block);
    if (everywhere || me == 0)
      sum(dtype, order, own, terms, size, 0, length);
  }
  return 0;
}

int32_t megabatch_broadcast(const struct lane *lane, char *part, int64_t count, int dtype, uint32_t kind) {
  int64_t bytes = count * item_bytes(dtype);
  for (int64_t done = 0; done < bytes; done += lane->half_bytes) {
    uint32_t block = next_block(lane);
    int64_t length = least(lane->half_bytes, bytes - done);
    if (lane->position == 0)
      memcpy(slot_of(lane, 0, block), part + done, length);
    int32_t lost = meet(lane, kind);
    if (lost)
      return lost;
    if (lane->position > 0)
      memcpy(part + done, slot_of(lane, 0, block), length);
  }
  return 0;
}
