// What a library for Android asks of its C library, by glibc: so that onnxruntime's bridge for Java, which npm has for
// Android alone, runs here.
#include <stddef.h>
#include <string.h>
void *__libc_malloc(size_t), *__libc_realloc(void *, size_t), __libc_free(void *);
void *own_malloc(size_t n) { return __libc_malloc(n); }
void *own_realloc(void *p, size_t n) { return __libc_realloc(p, n); }
void own_free(void *p) { __libc_free(p); }
void *own_memcpy(void *to, const void *from, size_t n) { return memmove(to, from, n); }
size_t own_strlen(const char *s) { return strchr(s, 0) - s; }
int own_nothing(void) { return 0; }
void own_abort(void) { __builtin_trap(); }
#define AS(own, name) __asm__(".symver own_" #own "," #name "@@LIBC")
AS(malloc, malloc);
AS(realloc, realloc);
AS(free, free);
AS(memcpy, memcpy);
AS(strlen, strlen);
AS(abort, __stack_chk_fail);
AS(nothing, dlclose);
AS(nothing, __cxa_atexit);
AS(nothing, __cxa_finalize);
AS(nothing, __register_atfork);
__asm__(".globl OrtSessionOptionsAppendExecutionProvider_Nnapi\n.set OrtSessionOptionsAppendExecutionProvider_Nnapi, own_nothing");
