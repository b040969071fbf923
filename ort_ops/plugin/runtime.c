// The part of a compiled library that is no machine code of kernels: it registers the operators of one training graph,
// makes their kernels from the tables that were written when the graph was compiled (tables.h), and refuses the rest.
//
// It needs libc and the table of functions that onnxruntime hands to RegisterCustomOps, by positions that never change.
// A kernel has copies of its plans, freed with it; workspace comes from a pool of 16 blocks, and from malloc for the
// time of a call where a call needs more than one block or more blocks are in use.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#define EXPORTED __declspec(dllexport)
__declspec(dllimport) uint32_t GetActiveProcessorCount(uint16_t);
#else
#include <unistd.h>
#define EXPORTED __attribute__((visibility("default")))
#endif

typedef int64_t word;
typedef void *(*function)();  // of onnxruntime
#define ADDRESS(x) (word)(intptr_t)(x)
#define NO_MEMORY "onnx_backprop: not enough memory for a kernel"
#define COUNT(table) (sizeof(table) / sizeof *(table))
enum { CREATE_STATUS = 0, CREATE_DOMAIN = 26, DOMAIN_ADD = 27, ADD_DOMAIN = 28, ATTRIBUTE_INT = 86, RELEASE_STATUS = 93,
       RELEASE_DOMAIN = 101, STRUCT_VERSION = 17, INVALID_ARGUMENT = 2, NOT_IMPLEMENTED = 9 };

typedef struct {  // what nodes of one number are: the words their state starts with, and their plans
  const word *state;
  word words;
  const word *const *plans;
  const word *sizes;
  word count;
} spec;

typedef struct {
  const char *name;
  const int *input_types, *characteristics, *output_types;
  size_t inputs, outputs;
  int variadic;
  void *compute;
  void (*destroy)(void *);
} operator_type;

#ifdef __linux__
// Huge pages for tensors of at least their size (MADV_COLLAPSE), as `ort_ops/huge_pages.py` has them for a Trainer: of
// blocks whose pages are all in memory, so this adds next to none.
#include <errno.h>
#include <sys/mman.h>
#define PAGES "/sys/kernel/mm/transparent_hugepage/"
enum { TENSOR_DATA = 51, ELEMENT_TYPE = 60, ELEMENT_COUNT = 64, TYPE_AND_SHAPE = 65, INPUT_COUNT = 88, INPUT = 90,
       RELEASE_INFO = 99, RUNS = 2, HUGEPAGE = 14, COLLAPSE = 25 };
static word block_bytes, block_pages;  // of a huge page; 0 bytes: there are none, or none are wanted
static word runs;         // of kernels that still ask: two for each that is created

static void look_for_huge_pages(void) {
  char text[2][80] = {"[never]", "0"};
  const char *wanted = getenv("ONNX_BACKPROP_HUGE_PAGES"), *paths[] = {PAGES "enabled", PAGES "hpage_pmd_size"};
  for (int n = 0; n < 2; n++) {
    FILE *file = fopen(paths[n], "r");
    if (file && !fgets(text[n], sizeof text[n], file)) *text[1] = 0;
    if (file) fclose(file);
  }
  if (!strstr(text[0], "[never]") && !(wanted && !strcmp(wanted, "0"))) block_bytes = atoll(text[1]);
  block_pages = block_bytes / sysconf(_SC_PAGESIZE);
  if (block_pages > 512) block_bytes = 0;
}

static int is_full(word block) {
  unsigned char pages[512];
  int missing = mincore((void *)(intptr_t)block, block_bytes, pages);
  for (word page = 0; page < block_pages; page++) missing |= ~pages[page] & 1;
  return !missing;
}

static void ask_for_huge_pages(const function *api, const void *context) {
  static const char sizes[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8, 8, 16, 2};  // by the number of the type
  size_t inputs = 0;
  void *status = api[INPUT_COUNT](context, &inputs);
  for (size_t n = 0; !status && n < inputs; n++) {
    void *value = NULL, *info = NULL;
    char *data = NULL;
    size_t count = 0;
    int type = 0;
    if ((status = api[INPUT](context, n, &value)) || !value) continue;
    if ((status = api[TYPE_AND_SHAPE](value, &info))) continue;
    if (!(status = api[ELEMENT_COUNT](info, &count)) && !(status = api[ELEMENT_TYPE](info, &type)))
      status = api[TENSOR_DATA](value, &data);
    api[RELEASE_INFO](info);
    word bytes = type >= 0 && type < (int)sizeof sizes ? (word)count * sizes[type] : 0;
    if (status || bytes < block_bytes) continue;
    word at = ADDRESS(data) / block_bytes * block_bytes, end = ADDRESS(data) + bytes;
    for (word first = at; first < end; first = at += block_bytes) {
      while (at < end && is_full(at)) at += block_bytes;
      void *blocks = (void *)(intptr_t)first;  // in one call: each waits for every processor
      if (at > first && madvise(blocks, at - first, COLLAPSE) && errno == EINVAL)
        madvise(blocks, at - first, HUGEPAGE);  // Linux before 6.1, later
    }
  }
  if (status) api[RELEASE_STATUS](status);
}
#endif

static void *run(word *kernel, void *context, function compute) {
#ifdef __linux__
  if (block_bytes && __atomic_load_n(&runs, __ATOMIC_RELAXED) > 0) {
    __atomic_fetch_sub(&runs, 1, __ATOMIC_RELAXED);
    ask_for_huge_pages((const function *)(intptr_t)kernel[0], context);
  }
#endif
  return compute(kernel, context);
}

static word runtime[RUNTIME_WORDS];
static word refuse(word *);
#include "tables.h"

typedef struct custom_op custom_op;
struct custom_op {  // OrtCustomOp as of version 17
  uint32_t version;
  void *create_kernel, *get_name, *get_execution_provider, *get_input_type, *get_input_count, *get_output_type,
      *get_output_count, *compute, *destroy, *get_input_characteristic, *get_output_characteristic,
      *get_input_memory_type, *get_variadic_input_min_arity, *get_variadic_input_homogeneity,
      *get_variadic_output_min_arity, *get_variadic_output_homogeneity, *create_kernel_v2, *compute_v2,
      *infer_output_shape, *get_start_version, *get_end_version, *get_may_inplace, *release_may_inplace,
      *get_alias_map, *release_alias_map;
  const operator_type *type;
};
static custom_op operators[COUNT(types)];
static void *domain;
static const function *domain_api;
static int state;  // 0: nothing is registered, 1: a thread is at it, 2: done

static const char *name_of(const custom_op *op) { return op->type->name; }
static const char *provider(const custom_op *op) { return (void)op, NULL; }
static int input_type(const custom_op *op, size_t n) { return op->type->input_types[n]; }
static size_t input_count(const custom_op *op) { return op->type->inputs; }
static int output_type(const custom_op *op, size_t n) { return op->type->output_types[n]; }
static size_t output_count(const custom_op *op) { return op->type->outputs; }
static int characteristic(const custom_op *op, size_t n) { return op->type->characteristics[n]; }
static int output_characteristic(const custom_op *op, size_t n) { return op->type->variadic ? 2 : n > 0; }
static int memory_type(const custom_op *op, size_t n) { return (void)op, (void)n, 0; }
static int is_variadic(const custom_op *op) { return op->type->variadic; }
static int first_version(const custom_op *op) { return (void)op, 1; }
static int last_version(const custom_op *op) { return (void)op, INT32_MAX; }

static void *failure(const function *api, int code, const char *text) { return api[CREATE_STATUS](code, text); }

static void *create(const custom_op *op, const function *api, const void *info, void **kernel) {
  word number = -1;
  void *status = api[ATTRIBUTE_INT](info, "spec", &number);
  *kernel = NULL;
  if (status) return status;
  if (number < 0 || number >= (word)COUNT(specs))
    return failure(api, INVALID_ARGUMENT, "onnx_backprop: this node is not of the graph that the library was made for");
  const spec *s = &specs[number];
  word *words = malloc(8 * s->words);
  if (!words) return failure(api, INVALID_ARGUMENT, NO_MEMORY);
  memcpy(words, s->state, 8 * s->words);
  words[0] = ADDRESS(api);
  for (word n = s->count; n--; words[STATE_COUNT]++) {  // the first one ends in front
    word *plan = malloc(8 * s->sizes[n]);
    if (!plan) return op->type->destroy(words), failure(api, INVALID_ARGUMENT, NO_MEMORY);
    memcpy(plan, s->plans[n], 8 * s->sizes[n]);
    plan[PLAN_NEXT] = words[STATE_PLANS];
    words[STATE_PLANS] = ADDRESS(plan);
  }
#ifdef __linux__
  __atomic_fetch_add(&runs, RUNS, __ATOMIC_RELAXED);
#endif
  *kernel = words;
  return NULL;
}

// For lengths that no plan was made for: the answer to a question of the kernel, a status that names both.
static word refuse(word *question) {
  const word *own = (const word *)(intptr_t)question[QUESTION_STATE], *key = (const word *)(intptr_t)question[QUESTION_KEY];
  char got[600] = "", text[2000];
  size_t end = 0;
  for (word n = 0, at = 1; n < key[0] && end + 40 < sizeof got; n++) {
    word kind = key[at], rank = key[at + 1] < MAX_RANK ? key[at + 1] : MAX_RANK, numbers = key[at + 2];
    end += snprintf(got + end, sizeof got - end, n ? ", %s" : "%s", kind ? "[" : "absent");
    for (word axis = 0; kind && axis < rank && end + 40 < sizeof got; axis++)
      end += snprintf(got + end, sizeof got - end, axis ? ",%lld" : "%lld", (long long)key[at + 3 + axis]);
    if (kind) end += snprintf(got + end, sizeof got - end, "]");
    at += 3 + (kind ? rank + numbers : 0);
  }
  snprintf(text, sizeof text, "onnx_backprop: this library was compiled for the lengths %s; inputs of other shapes, or "
           "none, came to this node: %s. Name their lengths too: onnx-backprop compile … --lengths …", LENGTHS, got);
  question[QUESTION_PLAN] = 0;
  question[QUESTION_STATUS] = ADDRESS(failure((const function *)(intptr_t)own[0], INVALID_ARGUMENT, text));
  return 0;
}

// What the level of the processor takes, and the processor does not have, or the system keeps from this process.
#define LACKS(who) "onnx_backprop: this library was compiled for " TARGET ", which has instructions that " who \
                   ". Compile it for another: onnx-backprop compile … --target …"
#if defined(__x86_64__) && defined(NEEDS)
#include <cpuid.h>
static const char *lacking(void) {
  const char *text = LACKS("this processor does not have");
  unsigned a, b, c = 0, d, low, leaf7[4] = {0}, extended = 0, vectors = NEEDS >= 4 ? 0xe6 : 0x6;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (~c & (1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29))) return text;
  __asm__("xgetbv" : "=a"(low), "=d"(d) : "c"(0));
  if ((low & vectors) != vectors || !__get_cpuid_count(7, 0, &leaf7[0], &leaf7[1], &leaf7[2], &leaf7[3])) return text;
  unsigned wanted = 1u << 3 | 1u << 5 | 1u << 8 | (NEEDS >= 4 ? 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31 : 0);
  if (~leaf7[1] & wanted || !__get_cpuid(0x80000001, &a, &b, &extended, &d) || ~extended & 1u << 5) return text;
#if NEEDS > 4  // registers of matrices, which Linux gives to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, …)
  if (~leaf7[3] & (1u << 22 | 1u << 24)) return text;
  if (~low & 3u << 17 || syscall(158L, 0x1023L, 18L)) return LACKS("the system does not let this process use");
#endif
  return NULL;
}
#else
static const char *lacking(void) { return NULL; }
#endif

static void *open_library(const function *api) {
  word threads;
#ifdef _WIN32
  threads = GetActiveProcessorCount(0xffff);
#else
  threads = sysconf(_SC_NPROCESSORS_ONLN);
#endif
#ifdef __linux__
  look_for_huge_pages();
#endif
  runtime[RUNTIME_THREADS] = threads < 1 ? 1 : threads > MOST_PROCESSORS ? MOST_PROCESSORS : threads;
  runtime[RUNTIME_MALLOC] = ADDRESS(&malloc);
  runtime[RUNTIME_FREE] = ADDRESS(&free);
  runtime[RUNTIME_NO_MEMORY] = ADDRESS(NO_MEMORY);
  void *made, *status = api[CREATE_DOMAIN](DOMAIN, &made);
  for (size_t n = 0; !status && n < COUNT(types); n++) {
    custom_op *op = &operators[n];
    op->version = STRUCT_VERSION;
    op->type = &types[n];
    op->get_name = name_of, op->get_execution_provider = provider;
    op->get_input_type = input_type, op->get_input_count = input_count;
    op->get_output_type = output_type, op->get_output_count = output_count;
    op->get_input_characteristic = characteristic, op->get_output_characteristic = output_characteristic;
    op->get_input_memory_type = memory_type;
    op->get_variadic_input_min_arity = op->get_variadic_input_homogeneity = is_variadic;
    op->get_variadic_output_min_arity = op->get_variadic_output_homogeneity = is_variadic;
    op->create_kernel_v2 = create, op->compute_v2 = types[n].compute, op->destroy = (void *)types[n].destroy;
    op->get_start_version = first_version, op->get_end_version = last_version;
    status = api[DOMAIN_ADD](made, op);
  }
  if (status) return status;
  domain = made, domain_api = api;
  return NULL;
}

typedef struct {
  const function *(*api_of)(uint32_t version);
} api_base;

EXPORTED void *RegisterCustomOps(void *options, const api_base *base) {
  const function *api = base->api_of(STRUCT_VERSION);
  if (!api) return failure(base->api_of(1), NOT_IMPLEMENTED, "onnx_backprop: this library needs onnxruntime 1.18 or later");
  const char *text = lacking();
  if (text) return failure(api, NOT_IMPLEMENTED, text);
  int seen = 0;
  while (!__atomic_compare_exchange_n(&state, &seen, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) && seen == 1) seen = 0;
  if (seen == 0) {
    void *status = open_library(api);
    __atomic_store_n(&state, status ? 0 : 2, __ATOMIC_RELEASE);
    if (status) return status;
  }
  return api[ADD_DOMAIN](options, domain);
}

#ifndef _WIN32  // where the end of a process is told in the same way, at which onnxruntime may have gone
__attribute__((destructor)) static void close_library(void) {
  for (size_t n = 0; n < POOL_SLOTS; n++) {
    word block = runtime[RUNTIME_WORDS - POOL_SLOTS + n];
    if (block) free((void *)(intptr_t)((word *)(intptr_t)block)[-1]);
  }
  if (domain) domain_api[RELEASE_DOMAIN](domain);
}
#endif
