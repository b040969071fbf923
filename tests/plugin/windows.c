// What Windows does with what the wheel for it carries, as far as that needs no Python: windows.exe FOLDER PROCESSOR
//
// llvmlite's library loads every object of FOLDER, as a process does that has no code to compile, and finds its function;
// operators.dll takes an operator and gives it to session options. Prints how many objects were loaded.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

typedef void *(*function)();
enum { STRUCT_VERSION = 17, CREATE_OPTIONS = 10, DIGEST = 32 };  // DIGEST: bytes in front of an object's
#define TRIPLE "x86_64-pc-windows-msvc-elf"  // as llvmlite asks for on Windows

static void *there(void *thing, const char *what) {
  if (!thing) printf("no %s\n", what), exit(1);
  return thing;
}
static function of(HMODULE library, const char *name) { return there((void *)GetProcAddress(library, name), name); }

static const char *name_of(const void *op) { return (void)op, "Nothing"; }
static const char *provider(const void *op) { return (void)op, NULL; }
static int element_type(const void *op, size_t n) { return (void)op, (void)n, 1; }
static size_t one(const void *op) { return (void)op, 1; }
static int none(const void *op, size_t n) { return (void)op, (void)n, 0; }

static void register_operators(void) {
  static void *op[26] = {(void *)STRUCT_VERSION, NULL, name_of, provider, element_type, one, element_type, one, NULL, NULL,
                         none, none, none, one, one, one, one, NULL, NULL, NULL, one, one};
  HMODULE own = there(LoadLibraryA("operators.dll"), "operators.dll");
  void **base = of(there(LoadLibraryA("onnxruntime.dll"), "onnxruntime.dll"), "OrtGetApiBase")();
  function *api = ((function)base[0])(STRUCT_VERSION);
  void *options, *status = api[CREATE_OPTIONS](&options);
  there(of(own, "AddExternalCustomOp")(op), "operator taken");
  if (status || (status = of(own, "RegisterCustomOps")(options, base))) printf("%s\n", (char *)api[2](status)), exit(1);
}

int main(int count, char **arguments) {
  if (count < 3) return 2;
  register_operators();
  HMODULE llvm = there(LoadLibraryA("llvmlite.dll"), "llvmlite.dll");
#define LLVM(name) of(llvm, "LLVMPY_" #name)
  LLVM(InitializeNativeTarget)(), LLVM(InitializeNativeAsmPrinter)();
  const char *error = "";
  void *target = there(LLVM(GetTargetFromTriple)(TRIPLE, &error), "target");
  void *machine = LLVM(CreateTargetMachine)(target, TRIPLE, arguments[2], "", 3, "static", "jitdefault", 0, 1, "");
  void *module = LLVM(ParseAssembly)(LLVM(GetGlobalContext)(), "target triple = \"" TRIPLE "\"", &error);
  void *engine = there(LLVM(CreateMCJITCompiler)(there(module, "module"), machine, 0, &error), "engine");
  char pattern[MAX_PATH], path[MAX_PATH], symbol[MAX_PATH];
  snprintf(pattern, sizeof pattern, "%s\\*.o", arguments[1]);
  WIN32_FIND_DATAA found;
  HANDLE search = FindFirstFileA(pattern, &found);
  if (search == INVALID_HANDLE_VALUE) return 1;
  do {  // all before the first is asked for: some call others
    snprintf(path, sizeof path, "%s\\%s", arguments[1], found.cFileName);
    char *bytes = malloc(found.nFileSizeLow);
    FILE *file = there(fopen(path, "rb"), path);
    if (fread(bytes, 1, found.nFileSizeLow, file) != found.nFileSizeLow) return 1;
    fclose(file);
    void *object = LLVM(CreateObjectFile)(bytes + DIGEST, (size_t)found.nFileSizeLow - DIGEST);
    LLVM(MCJITAddObjectFile)(engine, there(object, path));
  } while (FindNextFileA(search, &found));
  LLVM(FinalizeObject)(engine);
  int loaded = 0;
  search = FindFirstFileA(pattern, &found);
  do {
    snprintf(symbol, sizeof symbol, "carried.%.*s", (int)strlen(found.cFileName) - 2, found.cFileName);
    there(LLVM(GetFunctionAddress)(engine, symbol), symbol);
    loaded++;
  } while (FindNextFileA(search, &found));
  printf("%d\n", loaded);
  return 0;
}
