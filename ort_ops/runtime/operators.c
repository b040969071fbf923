// Takes the operators of a process and gives them to its sessions: what onnxruntime-extensions does on Linux and macOS,
// whose library for Windows does not export it. It needs no C library but what it is linked with, and onnxruntime's table
// of functions, by positions that never change.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef _WIN32
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

#define DOMAIN "onnx_backprop.native"  // NATIVE_DOMAIN of opset/functions/native.py
typedef void *(*function)();
enum { CREATE_DOMAIN = 26, DOMAIN_ADD = 27, ADD_DOMAIN = 28, STRUCT_VERSION = 17 };
typedef struct {
  const function *(*api_of)(uint32_t version);
} api_base;

static const void **operators;
static size_t count, given;
static void *domain;  // of all sessions, whose operators outlive it

EXPORTED int AddExternalCustomOp(const void *op) {
  const void **more = realloc(operators, (count + 1) * sizeof *more);
  if (more) operators = more, operators[count++] = op;
  return more != NULL;
}

// Callers take turns: this package registers under a lock.
EXPORTED void *RegisterCustomOps(void *options, const api_base *base) {
  const function *api = base->api_of(STRUCT_VERSION);
  void *status = domain ? NULL : api[CREATE_DOMAIN](DOMAIN, &domain);
  for (; !status && given < count; given++) status = api[DOMAIN_ADD](domain, operators[given]);
  return status ? status : api[ADD_DOMAIN](options, domain);
}
