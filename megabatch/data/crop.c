/* Decodes the wanted part of a JPEG image and scales it, to the same bytes as Pillow would, in less time.

   libjpeg is the one that Pillow brings along (or the system's), opened when the program runs, so that building needs
   a C compiler and nothing else. Its structs are declared below by position: the binary interface of version 6b,
   unchanged since 1998, on machines with 64-bit pointers. jpeg_CreateDecompress compares version and size and
   refuses a library built otherwise; a test compares every position with jpeglib.h where that is installed.

   Anything unusual is answered with a code, never with pixels: the caller then takes the way through Pillow. */

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DONE = 0, NO_LIBRARY = 1, NO_MEMORY = 2, UNUSUAL = 3, BROKEN = 4 };
enum { GREY = 1, RGB = 2, YCBCR = 3 };                      /* J_COLOR_SPACE */
enum { VERSION = 62, READ_OK = 1, MARGIN_COLUMNS = 16 };

struct errors {                                             /* jpeg_error_mgr */
  void (*error_exit)(void *);
  void (*emit_message)(void *, int);
  void (*output_message)(void *);
  char rest[144];
};

struct image {                                            /* jpeg_decompress_struct */
  struct errors *err;
  char to_image_width[40];
  unsigned int image_width, image_height;
  int num_components, jpeg_color_space, out_color_space;
  unsigned int scale_num, scale_denom;
  char to_output_width[60];
  unsigned int output_width, output_height;
  char to_output_scanline[24];
  unsigned int output_scanline;
  char rest[460];
};

_Static_assert(sizeof(void *) == 8, "positions are those of 64-bit machines");
_Static_assert(sizeof(struct errors) == 168 && sizeof(struct image) == 632, "sizes of version 6b");
_Static_assert(offsetof(struct image, image_width) == 48 && offsetof(struct image, output_width) == 136 &&
                   offsetof(struct image, output_scanline) == 168,
               "positions of version 6b");

static struct {
  struct errors *(*std_error)(struct errors *);
  void (*create)(struct image *, int, size_t);
  void (*destroy)(struct image *);
  void (*source)(struct image *, const uint8_t *, unsigned long);
  int (*read_header)(struct image *, int);
  int (*start)(struct image *);
  void (*crop)(struct image *, unsigned int *, unsigned int *);
  unsigned int (*skip)(struct image *, unsigned int);
  unsigned int (*read)(struct image *, uint8_t **, unsigned int);
} jpeg;

struct trap {
  struct errors errors; /* first: libjpeg hands back a pointer to it */
  jmp_buf out;
};

static void leave(void *image) { longjmp(((struct trap *)((struct image *)image)->err)->out, 1); }
static void hush(void *image, int level) { (void)image, (void)level; }
static void hush_output(void *image) { (void)image; }

/* ---- memory: one block a thread, kept between images, given back when the thread ends ---- */

struct block {
  size_t size;
  uint8_t *bytes;
};
static pthread_key_t block_key;
static pthread_once_t block_once = PTHREAD_ONCE_INIT;

static void free_block(void *kept) {
  free(((struct block *)kept)->bytes);
  free(kept);
}
static void make_key(void) { pthread_key_create(&block_key, free_block); }

static uint8_t *scratch(size_t size) {
  pthread_once(&block_once, make_key);
  struct block *block = pthread_getspecific(block_key);
  if (!block) {
    if (!(block = calloc(1, sizeof *block))) return NULL;
    pthread_setspecific(block_key, block);
  }
  if (block->size < size) {
    free(block->bytes);
    block->size = 0;
    if (!(block->bytes = malloc(size))) return NULL;
    block->size = size;
  }
  return block->bytes;
}

/* ---- scaling: a triangle filter as wide as the reduction, rows first, rounded to bytes between the passes; weights in
   1 / 2^22, so that the result is Pillow's bit for bit (its BILINEAR filter) ---- */

enum { BITS = 22, HALF = 1 << (BITS - 1) };

static inline uint8_t to_byte(int32_t sum) {
  sum >>= BITS;
  return sum > 255 ? 255 : (uint8_t)sum;
}

static int num_taps(double from, double to, int out) {
  double scale = (to - from) / out;
  return (int)ceil(scale < 1.0 ? 1.0 : scale) * 2 + 1;
}

static void weigh(int size, double from, double to, int out, int taps, int *first, int *count, int32_t *weights) {
  double scale = (to - from) / out, reach = scale < 1.0 ? 1.0 : scale, narrow = 1.0 / reach, sums[1024];
  for (int x = 0; x < out; x++) {
    double centre = from + (x + 0.5) * scale, total = 0.0;
    int low = (int)(centre - reach + 0.5), high = (int)(centre + reach + 0.5);
    low = low < 0 ? 0 : low;
    high = (high > size ? size : high) - low;
    for (int k = 0; k < high; k++) {
      double at = fabs((k + low - centre + 0.5) * narrow), weight = at < 1.0 ? 1.0 - at : 0.0;
      sums[k] = weight;
      total += weight;
    }
    for (int k = 0; k < high; k++) {
      double weight = total != 0.0 ? sums[k] / total : sums[k];
      weights[(size_t)x * taps + k] = (int32_t)(0.5 + weight * (1 << BITS));
    }
    first[x] = low;
    count[x] = high;
  }
}

static void one_row(const uint8_t *row, int channels, int out, int taps, const int *first, const int *count,
                    const int32_t *weights, int mirror, uint8_t *to) {
  for (int x = 0; x < out; x++)
    for (int c = 0; c < channels; c++) {
      int32_t sum = HALF;
      for (int k = 0; k < count[x]; k++)
        sum += row[(size_t)(first[x] + k) * channels + c] * weights[(size_t)x * taps + k];
      to[(size_t)(mirror ? out - 1 - x : x) * channels + c] = to_byte(sum);
    }
}

static void one_column(const uint8_t *rows, size_t stride, int count, const int32_t *weights, int length, uint8_t *to) {
  for (int i = 0; i < length; i++) {
    int32_t sum = HALF;
    for (int k = 0; k < count; k++) sum += rows[k * stride + i] * weights[k];
    to[i] = to_byte(sum);
  }
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Four pixels at once, one of each of four rows: a register holds two of them, four numbers each, the fourth unused. */
__attribute__((target("avx2"))) static void four_rows(const uint8_t *row, size_t stride, int out, int taps,
                                                      const int *first, const int *count, const int32_t *weights,
                                                      int mirror, uint8_t *to, size_t to_stride) {
  const __m256i pick = _mm256_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 8, 4, 0, -1, -1, -1, -1, -1, -1,
                                       -1, -1, -1, -1, -1, -1, -1, 8, 4, 0);
  const __m256i half = _mm256_set1_epi32(HALF), most = _mm256_set1_epi32(255);
  for (int x = 0; x < out; x++) {
    const int32_t *weight = weights + (size_t)x * taps;
    const uint8_t *at = row + (size_t)first[x] * 3;
    uint8_t *place = to + (size_t)(mirror ? out - 1 - x : x) * 3;
    __m256i sums[2] = {half, half};
    for (int k = 0; k < count[x]; k++, at += 3) {
      __m256i times = _mm256_set1_epi32(weight[k]);
      for (int pair = 0; pair < 2; pair++) {
        int upper, lower;
        memcpy(&upper, at + 2 * pair * stride, 4);
        memcpy(&lower, at + (2 * pair + 1) * stride, 4);
        __m256i pixels = _mm256_cvtepu8_epi32(_mm_insert_epi32(_mm_cvtsi32_si128(upper), lower, 1));
        sums[pair] = _mm256_add_epi32(sums[pair], _mm256_mullo_epi32(pixels, times));
      }
    }
    for (int pair = 0; pair < 2; pair++) {
      __m256i bytes = _mm256_shuffle_epi8(_mm256_min_epi32(_mm256_srai_epi32(sums[pair], BITS), most), pick);
      int upper = _mm256_extract_epi32(bytes, 0), lower = _mm256_extract_epi32(bytes, 4);
      memcpy(place + 2 * pair * to_stride, &upper, 3);
      memcpy(place + (2 * pair + 1) * to_stride, &lower, 3);
    }
  }
}

__attribute__((target("avx2"))) static int wide_column(const uint8_t *rows, size_t stride, int count,
                                                       const int32_t *weights, int length, uint8_t *to) {
  const __m256i half = _mm256_set1_epi32(HALF), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  int i = 0;
  for (; i + 32 <= length; i += 32) {
    __m256i a = half, b = half, c = half, d = half;
    for (int k = 0; k < count; k++) {
      const __m128i *from = (const __m128i *)(rows + k * stride + i);
      __m256i times = _mm256_set1_epi32(weights[k]);
      __m128i low = _mm_loadu_si128(from), high = _mm_loadu_si128(from + 1);
      a = _mm256_add_epi32(a, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(low), times));
      b = _mm256_add_epi32(b, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(low, 8)), times));
      c = _mm256_add_epi32(c, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(high), times));
      d = _mm256_add_epi32(d, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(high, 8)), times));
    }
    __m256i ab = _mm256_packs_epi32(_mm256_srai_epi32(a, BITS), _mm256_srai_epi32(b, BITS));
    __m256i cd = _mm256_packs_epi32(_mm256_srai_epi32(c, BITS), _mm256_srai_epi32(d, BITS));
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order);
    _mm256_storeu_si256((__m256i *)(to + i), bytes);
  }
  return i;
}
#endif

static int has_wide(void) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2");
#else
  return 0;
#endif
}

static size_t scale_bytes(int height, int width, int channels, const double *box, int out_height, int out_width) {
  size_t weights = (size_t)out_width * num_taps(box[0], box[2], out_width) +
                   (size_t)out_height * num_taps(box[1], box[3], out_height);
  size_t across_first = (size_t)height * out_width, down_first = (size_t)out_height * width;
  return (weights + 2 * ((size_t)out_width + out_height)) * sizeof(int32_t) +
         (across_first > down_first ? across_first : down_first) * channels + 64;
}

/* Scales the rows in[height][width] to out[height][out_width]. Rows before `padded` may be read a byte beyond their end. */
static void scale_rows(const uint8_t *in, size_t stride, int height, int channels, int padded, int out_width, int taps,
                       const int *first, const int *count, const int32_t *weights, int mirror, uint8_t *out) {
  size_t length = (size_t)out_width * channels;
  int y = 0;
#if defined(__x86_64__)
  if (channels == 3 && has_wide())
    for (; y + 4 <= height && y + 4 <= padded; y += 4)
      four_rows(in + y * stride, stride, out_width, taps, first, count, weights, mirror, out + y * length, length);
#endif
  for (; y < height; y++)
    one_row(in + y * stride, channels, out_width, taps, first, count, weights, mirror, out + y * length);
}

static void scale_columns(const uint8_t *in, size_t stride, int length, int out_height, int taps, const int *first,
                          const int *count, const int32_t *weights, uint8_t *out) {
  for (int y = 0; y < out_height; y++) {
    const uint8_t *rows = in + first[y] * stride;
    const int32_t *of_row = weights + (size_t)y * taps;
    uint8_t *to = out + (size_t)y * length;
    int done = 0;
#if defined(__x86_64__)
    if (has_wide()) done = wide_column(rows, stride, count[y], of_row, length, to);
#endif
    one_column(rows + done, stride, count[y], of_row, length - done, to + done);
  }
}

/* `box`: left, top, right, bottom. Rows before `padded` may be read one byte beyond their end. */
static int scale_into(const uint8_t *in, size_t stride, int height, int width, int channels, int padded, const double *box,
                      int mirror, int out_height, int out_width, uint8_t *memory, uint8_t *out) {
  int across = num_taps(box[0], box[2], out_width), down = num_taps(box[1], box[3], out_height);
  if (across > 1000 || down > 1000) return UNUSUAL;
  int32_t *across_weights = (int32_t *)memory, *down_weights = across_weights + (size_t)out_width * across;
  int *across_first = (int *)(down_weights + (size_t)out_height * down), *across_count = across_first + out_width;
  int *down_first = across_count + out_width, *down_count = down_first + out_height;
  uint8_t *middle = (uint8_t *)(down_count + out_height);
  weigh(width, box[0], box[2], out_width, across, across_first, across_count, across_weights);
  weigh(height, box[1], box[3], out_height, down, down_first, down_count, down_weights);
  if (height - out_height > 0 && height - out_height > (width - out_width) * 2) { /* the rule of Pillow 13 */
    scale_columns(in, stride, width * channels, out_height, down, down_first, down_count, down_weights, middle);
    scale_rows(middle, (size_t)width * channels, out_height, channels, out_height, out_width, across, across_first,
               across_count, across_weights, mirror, out);
  } else {
    int top = down_first[0], bottom = down_first[out_height - 1] + down_count[out_height - 1];
    for (int y = 0; y < out_height; y++) down_first[y] -= top;
    scale_rows(in + top * stride, stride, bottom - top, channels, padded - top, out_width, across, across_first,
               across_count, across_weights, mirror, middle);
    scale_columns(middle, (size_t)out_width * channels, out_width * channels, out_height, down, down_first, down_count,
                  down_weights, out);
  }
  return DONE;
}

/* ---- what Python calls ---- */

int megabatch_open(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return NO_LIBRARY;
  *(void **)&jpeg.std_error = dlsym(library, "jpeg_std_error");
  *(void **)&jpeg.create = dlsym(library, "jpeg_CreateDecompress");
  *(void **)&jpeg.destroy = dlsym(library, "jpeg_destroy_decompress");
  *(void **)&jpeg.source = dlsym(library, "jpeg_mem_src");
  *(void **)&jpeg.read_header = dlsym(library, "jpeg_read_header");
  *(void **)&jpeg.start = dlsym(library, "jpeg_start_decompress");
  *(void **)&jpeg.crop = dlsym(library, "jpeg_crop_scanline");
  *(void **)&jpeg.skip = dlsym(library, "jpeg_skip_scanlines");
  *(void **)&jpeg.read = dlsym(library, "jpeg_read_scanlines");
  if (!(jpeg.std_error && jpeg.create && jpeg.destroy && jpeg.source && jpeg.read_header && jpeg.start && jpeg.crop &&
        jpeg.skip && jpeg.read))
    return NO_LIBRARY;
  struct trap trap;
  struct image image;
  memset(&image, 0, sizeof image);
  image.err = jpeg.std_error(&trap.errors);
  trap.errors.error_exit = leave;
  trap.errors.output_message = hush_output;
  if (setjmp(trap.out)) return NO_LIBRARY; /* another version, or another size */
  jpeg.create(&image, VERSION, sizeof image);
  jpeg.destroy(&image);
  return DONE;
}

/* Rows and columns of in[height][width][channels], rows `stride` bytes apart, scaled into out[out_height][out_width]. */
int megabatch_resize(const uint8_t *in, size_t stride, int height, int width, int channels, const double *box, int mirror,
                     int out_height, int out_width, uint8_t *out) {
  uint8_t *memory = scratch(scale_bytes(height, width, channels, box, out_height, out_width));
  if (!memory) return NO_MEMORY;
  /* The last row may end where the process's memory does. */
  return scale_into(in, stride, height, width, channels, height - 1, box, mirror, out_height, out_width, memory, out);
}

/* The JPEG reduced by `denominator` (1, 2, 4 or 8), of that the region [left, right) x [top, bottom), and of that `box`
   scaled into out[out_height][out_width][3]. image_width and image_height are what the caller read in the header. */
int megabatch_decode(const uint8_t *encoded, size_t num_bytes, int image_height, int image_width, int denominator,
                     const int *region, const double *box, int mirror, int out_height, int out_width, uint8_t *out) {
  struct trap trap;
  struct image image;
  memset(&image, 0, sizeof image);
  image.err = jpeg.std_error(&trap.errors);
  trap.errors.error_exit = leave;
  trap.errors.emit_message = hush;
  trap.errors.output_message = hush_output;
  volatile int result = BROKEN;
  if (setjmp(trap.out)) {
    jpeg.destroy(&image);
    return result;
  }
  jpeg.create(&image, VERSION, sizeof image);
  jpeg.source(&image, encoded, (unsigned long)num_bytes);
  int left = region[0], top = region[1], right = region[2], bottom = region[3];
  int space = jpeg.read_header(&image, 1) == READ_OK ? image.jpeg_color_space : 0;
  if ((space != GREY && space != RGB && space != YCBCR) || image.image_width != (unsigned)image_width ||
      image.image_height != (unsigned)image_height) {
    jpeg.destroy(&image);
    return UNUSUAL;
  }
  image.out_color_space = RGB;
  image.scale_num = 1;
  image.scale_denom = (unsigned)denominator;
  jpeg.start(&image);
  /* Chroma between its samples is made from both neighbours: a margin keeps the region's edges what they are in the
     whole image. */
  unsigned int from = left > MARGIN_COLUMNS ? (unsigned)(left - MARGIN_COLUMNS) : 0;
  unsigned int until = (unsigned)right + MARGIN_COLUMNS;
  if (until > image.output_width) until = image.output_width;
  unsigned int columns = until - from, whole = image.output_width;
  if (left < 0 || top < 0 || right <= left || bottom <= top || (unsigned)right > whole ||
      (unsigned)bottom > image.output_height) {
    jpeg.destroy(&image);
    return UNUSUAL;
  }
  if (from > 0 || until < whole) jpeg.crop(&image, &from, &columns);
  size_t stride = (size_t)columns * 3;
  int height = bottom - top;
  size_t pixels = (stride * height + 64) / 64 * 64;
  uint8_t *memory = scratch(pixels + scale_bytes(height, right - left, 3, box, out_height, out_width));
  if (!memory) {
    jpeg.destroy(&image);
    return NO_MEMORY;
  }
  if (top > 0 && jpeg.skip(&image, (unsigned)top) != (unsigned)top) leave(&image);
  for (int y = 0; y < height;) {
    uint8_t *row = memory + y * stride;
    unsigned int got = jpeg.read(&image, &row, 1);
    if (got == 0) leave(&image);
    y += (int)got;
  }
  jpeg.destroy(&image); /* what lies below the region is never looked at */
  return scale_into(memory + (left - (int)from) * 3, stride, height, right - left, 3, height, box, mirror, out_height,
                    out_width, memory + pixels, out);
}
