// The binary of every FMU: FMI 3 over three graphs that onnxruntime runs, f.onnx, jvp.onnx and vjp.onnx, as
// resources/fmu.txt says. One FMU and another differ in their resources alone.
//
// onnxruntime's shared library is the one that the environment variable ONNXRUNTIME_LIB names, or else that in
// resources/PLATFORM, or else what the system's loader finds. Its table of functions is read by positions that never
// change. Derivatives are loaded when they are first asked for.
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <windows.h>
#define EXPORTED __declspec(dllexport)
#define SYSTEM "windows"
#define LIBRARY "onnxruntime.dll"
#define CALLED __stdcall
#else
#include <dlfcn.h>
#define EXPORTED __attribute__((visibility("default")))
#define CALLED
#ifdef __APPLE__
#define SYSTEM "darwin"
#define LIBRARY "libonnxruntime.dylib"
#else
#define SYSTEM "linux"
#define LIBRARY "libonnxruntime.so"
#endif
#endif
#ifdef __aarch64__
#define PLATFORM "aarch64-" SYSTEM
#else
#define PLATFORM "x86_64-" SYSTEM
#endif

enum { DONE = 0, FAILED = 3 };  // fmi3Status
enum { F, JVP, VJP, GRAPHS };
enum { FLOAT32 = 1, FLOAT64 = 11 };  // ONNX's element types
// positions in OrtApi
enum { ERROR_MESSAGE = 2, CREATE_ENV = 3, CREATE_SESSION = 8, RUN = 9, CREATE_OPTIONS = 10, SET_SEVERITY = 22,
       SET_THREADS = 24, CREATE_TENSOR = 49, CREATE_MEMORY = 69, RELEASE_ENV = 92, RELEASE_STATUS = 93,
       RELEASE_MEMORY = 94, RELEASE_SESSION = 95, RELEASE_VALUE = 96, RELEASE_OPTIONS = 100, API_VERSION = 17 };
typedef void *(CALLED *function)();
typedef int status;
typedef uint32_t reference;
typedef void *instance;
typedef const char *text;
typedef void (*logger)(void *, status, text, text);

typedef struct {
  char kind;  // (i)nput, (s)tate, (o)utput, (d)erivative of the state of the same number
  int type;
  int64_t dims[16];
  size_t rank, count, size;  // size: bytes of all elements
  char *name[GRAPHS];        // of the value, and of its seed or result in the other graphs
  char *value[GRAPHS];       // their numbers
  void *tensor[GRAPHS];
} variable;

typedef struct {
  void *environment;
  logger log;
  char *resources;
  const function *api;
  void *env, *memory, *session[GRAPHS];
  variable *variables;
  size_t count, bytes;  // of variables; of the numbers, which lie one after the other, those of `value[F]` first
  char *numbers, *start;
  double time, start_time;
  bool stale;  // outputs are those of other inputs
} model;

static status fail(model *m, text format, ...) {
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  if (m->log) m->log(m->environment, FAILED, "logStatusError", message);
  return FAILED;
}

// Whether a call of onnxruntime worked.
static bool worked(model *m, text what, void *problem) {
  if (!problem) return true;
  fail(m, "%s: %s", what, (text)m->api[ERROR_MESSAGE](problem));
  m->api[RELEASE_STATUS](problem);
  return false;
}

#ifdef _WIN32
static wchar_t *wide(text path) {
  static wchar_t buffer[4096];
  return MultiByteToWideChar(CP_UTF8, 0, path, -1, buffer, 4096) ? buffer : L"";
}
#endif

static FILE *open_file(text path) {
#ifdef _WIN32
  return _wfopen(wide(path), L"rb");
#else
  return fopen(path, "rb");
#endif
}

static void *open_library(text path) {
#ifdef _WIN32
  return (void *)LoadLibraryExW(wide(path), NULL, strchr(path, '\\') || strchr(path, '/') ? 8 : 0);
#else
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
#endif
}

// The file of a name among the resources, in `path`.
static text resource(model *m, char *path, size_t size, text name) {
  size_t length = strlen(m->resources);
  bool ends = length && strchr("/\\", m->resources[length - 1]);
  snprintf(path, size, "%s%s%s", m->resources, ends ? "" : "/", name);
  return path;
}

static bool load_runtime(model *m) {
  char path[4096];
  text named = getenv("ONNXRUNTIME_LIB");
  void *library = named && *named ? open_library(named) : open_library(resource(m, path, sizeof path, PLATFORM "/" LIBRARY));
  if (!library && !(named && *named)) library = open_library(LIBRARY);
  if (!library) {
    fail(m, "onnxruntime's library was not found: %s. Set ONNXRUNTIME_LIB to the path of " LIBRARY,
         named && *named ? named : "neither resources/" PLATFORM " nor the system has it");
    return false;
  }
#ifdef _WIN32
  function base = (function)(void *)GetProcAddress((HMODULE)library, "OrtGetApiBase");
#else
  function base;
  *(void **)&base = dlsym(library, "OrtGetApiBase");
#endif
  const function *entry = base ? base() : NULL;
  m->api = entry ? entry[0](API_VERSION) : NULL;
  if (!m->api) return fail(m, "%s is no onnxruntime of 1.17 or later", named && *named ? named : LIBRARY), false;
  return worked(m, "onnxruntime", m->api[CREATE_ENV](3, "fmu", &m->env)) &&
         worked(m, "onnxruntime", m->api[CREATE_MEMORY](0, 0, &m->memory));
}

static char *line(FILE *file) {
  size_t size = 256, length = 0;
  char *buffer = malloc(size);
  while (buffer && fgets(buffer + length, (int)(size - length), file)) {
    length += strlen(buffer + length);
    if (length && buffer[length - 1] == '\n') return buffer[length - 1] = 0, buffer;
    char *larger = realloc(buffer, size *= 2);
    if (!larger) break;
    buffer = larger;
  }
  free(buffer);
  return NULL;
}

static double number(const variable *v, int which, size_t n) {
  return v->type == FLOAT64 ? ((double *)v->value[which])[n] : (double)((float *)v->value[which])[n];
}

static void put(const variable *v, int which, size_t n, double value) {
  if (v->type == FLOAT64) ((double *)v->value[which])[n] = value;
  else ((float *)v->value[which])[n] = (float)value;
}

static bool read_variables(model *m) {
  char path[4096];
  FILE *file = open_file(resource(m, path, sizeof path, "fmu.txt"));
  if (!file) return fail(m, "%s is not there", path), false;
  char *head = line(file), *starts = NULL;
  m->count = head ? (size_t)strtoull(head, NULL, 10) : 0;
  m->variables = calloc(m->count + 1, sizeof *m->variables);
  bool complete = head && m->variables;
  size_t total = 0;
  for (size_t k = 0; complete && k < m->count; k++) {
    variable *v = &m->variables[k];
    char *shape = line(file), *rest = shape;
    if ((complete = shape && shape[0])) {
      v->kind = *rest++;
      v->type = (int)strtol(rest, &rest, 10);
      v->rank = (size_t)strtoull(rest, &rest, 10);
      v->count = 1;
      complete = v->rank <= 16;
      for (size_t n = 0; n < v->rank && n < 16; n++) v->count *= (size_t)(v->dims[n] = strtoll(rest, &rest, 10));
      v->size = v->count * (v->type == FLOAT64 ? 8 : 4);
      for (int which = 0; which < GRAPHS; which++) complete = (v->name[which] = line(file)) && complete;
      total += (v->size + 7) / 8 * 8;
    }
    free(shape);
  }
  m->bytes = total;
  m->numbers = complete ? calloc(GRAPHS, total + 8) : NULL;
  m->start = complete ? calloc(1, total + 8) : NULL;
  complete = m->numbers && m->start;
  for (int which = 0; complete && which < GRAPHS; which++) {
    char *next = m->numbers + (size_t)which * total;
    for (size_t k = 0; k < m->count; next += (m->variables[k++].size + 7) / 8 * 8) m->variables[k].value[which] = next;
  }
  for (size_t k = 0; complete && k < m->count; k++) {  // starts, zeros where there are none
    if (strchr("od", m->variables[k].kind)) continue;
    char *rest = starts = line(file);
    complete = rest != NULL;
    for (size_t n = 0; rest && *rest && n < m->variables[k].count; n++) put(&m->variables[k], F, n, strtod(rest, &rest));
    free(starts);
  }
  if (complete) memcpy(m->start, m->numbers, total);
  free(head);
  fclose(file);
  return complete || (fail(m, "%s is damaged", path), false);
}

// Run a graph: of f, states and inputs go in; of the others seeds too, for `jvp` of these, for `vjp` of the rest.
static status run(model *m, int which) {
  static const text files[] = {"f.onnx", "jvp.onnx", "vjp.onnx"};
  if (!m->session[which]) {
    char path[4096];
    void *options = NULL, *content = NULL;
    FILE *file = open_file(resource(m, path, sizeof path, files[which]));
    if (!file) return fail(m, "%s is not there", path);
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    bool good = (content = malloc(size + 1)) && fread(content, 1, size, file) == size;
    fclose(file);
    if (!good) fail(m, "%s cannot be read", path);
    good = good && worked(m, files[which], m->api[CREATE_OPTIONS](&options)) &&
           worked(m, files[which], m->api[SET_THREADS](options, 1)) &&
           worked(m, files[which], m->api[SET_SEVERITY](options, 3)) &&
           worked(m, files[which], m->api[CREATE_SESSION](m->env, content, size, options, &m->session[which]));
    if (options) m->api[RELEASE_OPTIONS](options);
    free(content);
    if (!good) return FAILED;
  }
  text *names = malloc(3 * m->count * sizeof *names);
  void **values = malloc(3 * m->count * sizeof *values);
  if (!names || !values) return free(names), free(values), fail(m, "not enough memory");
  size_t inputs = 0, outputs = 0;
  for (int end = 0; end < 2; end++)
    for (size_t k = 0; k < m->count; k++) {
      variable *v = &m->variables[k];
      bool independent = strchr("is", v->kind) != NULL;
      for (int part = 0; part <= which; part += which ? which : 1) {  // the value, then its seed or result
        bool in = part == F ? independent : which == JVP ? independent : !independent;
        if ((part == F && !independent && which) || in == (end == 1)) continue;
        if (!v->tensor[part] &&
            !worked(m, v->name[F], m->api[CREATE_TENSOR](m->memory, v->value[part], v->size, v->dims, v->rank, v->type, &v->tensor[part])))
          return free(names), free(values), FAILED;
        names[inputs + outputs] = v->name[part], values[inputs + outputs] = v->tensor[part];
        *(end ? &outputs : &inputs) += 1;
      }
    }
  void *problem = m->api[RUN](m->session[which], NULL, names, values, inputs, names + inputs, outputs, values + inputs);
  free(names);
  free(values);
  return worked(m, files[which], problem) ? DONE : FAILED;
}

static status evaluate(model *m) {
  if (!m->stale) return DONE;
  status done = run(m, F);
  m->stale = done != DONE;
  return done;
}

static void destroy(model *m) {
  for (size_t k = 0; m->variables && k < m->count; k++)
    for (int which = 0; which < GRAPHS; which++) {
      free(m->variables[k].name[which]);
      if (m->variables[k].tensor[which]) m->api[RELEASE_VALUE](m->variables[k].tensor[which]);
    }
  for (int which = 0; which < GRAPHS; which++)
    if (m->session[which]) m->api[RELEASE_SESSION](m->session[which]);
  if (m->memory) m->api[RELEASE_MEMORY](m->memory);
  if (m->env) m->api[RELEASE_ENV](m->env);
  free(m->variables), free(m->numbers), free(m->start), free(m->resources), free(m);
}

static instance create(text resources, void *environment, logger log) {
  model *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  m->environment = environment, m->log = log, m->stale = true;
  text given = resources ? resources : "";
  if (!strncmp(given, "file://", 7)) given += 7;
  if ((m->resources = malloc(strlen(given) + 1)) && strcpy(m->resources, given) && load_runtime(m) && read_variables(m))
    return m;
  destroy(m);
  return NULL;
}

static variable *find(model *m, reference r) {
  if (r >= 1 && r <= m->count) return &m->variables[r - 1];
  fail(m, "no variable has the value reference %u", r);
  return NULL;
}

// Copy numbers of one element type from or to variables.
static status transfer(model *m, const reference *r, size_t count, void *numbers, size_t given, int type, bool set) {
  size_t place = 0, width = type == FLOAT64 ? 8 : 4;
  for (size_t k = 0; k < count; k++) {
    if (!r[k] && type == FLOAT64 && !set && place < given) {
      ((double *)numbers)[place++] = m->time;
      continue;
    }
    variable *v = find(m, r[k]);
    if (!v) return FAILED;
    if (v->type != type) return fail(m, "%s is a Float%d, not a Float%d", v->name[F], v->type == FLOAT64 ? 64 : 32, (int)width * 8);
    if (set && strchr("od", v->kind)) return fail(m, "%s is computed and cannot be set", v->name[F]);
    if (place + v->count > given) return fail(m, "%s has %zu elements, and %zu are left", v->name[F], v->count, given - place);
    if (!set && strchr("od", v->kind) && evaluate(m) != DONE) return FAILED;
    char *end = (char *)numbers + place * width;
    if (set) memcpy(v->value[F], end, v->size), m->stale = true;
    else memcpy(end, v->value[F], v->size);
    place += v->count;
  }
  return place == given ? DONE : fail(m, "%zu numbers were expected, got %zu", place, given);
}

// Seeds of the variables of one side to results of those of the other.
static status derive(model *m, int which, const reference *from, size_t seeds, const double *seed, size_t given,
                     const reference *to, size_t results, double *result, size_t wanted) {
  size_t place = 0;
  for (size_t k = 0; k < m->count; k++) memset(m->variables[k].value[which], 0, m->variables[k].size);
  for (int end = 0; end < 2; end++) {
    const reference *r = end ? to : from;
    for (size_t k = place = 0; k < (end ? results : seeds); k++) {
      variable *v = find(m, r[k]);
      if (!v) return FAILED;
      bool independent = strchr("is", v->kind) != NULL;
      if (independent == ((which == JVP) == (end == 1)))
        return fail(m, "%s: %s is no %s", which == JVP ? "fmi3GetDirectionalDerivative" : "fmi3GetAdjointDerivative", v->name[F],
                    independent ? "output and no derivative" : "input and no state");
      if (place + v->count > (end ? wanted : given))
        return fail(m, "%s has %zu elements, more than are left of %zu", v->name[F], v->count, end ? wanted : given);
      for (size_t n = 0; n < v->count; n++, place++)
        if (end) result[place] = number(v, which, n);
        else put(v, which, n, number(v, which, n) + seed[place]);
    }
    if (place != (end ? wanted : given)) return fail(m, "%zu numbers were expected, got %zu", place, end ? wanted : given);
    if (!end && run(m, which) != DONE) return FAILED;
  }
  return DONE;
}

// All states, or all their derivatives, one after the other.
static status states(model *m, char kind, double *numbers, size_t given, bool set) {
  size_t place = 0;
  if (kind == 'd' && evaluate(m) != DONE) return FAILED;
  for (size_t k = 0; k < m->count; k++) {
    variable *v = &m->variables[k];
    for (size_t n = 0; v->kind == kind && n < v->count; n++, place++) {
      if (place >= given) return fail(m, "there are more states than %zu", given);
      if (set) put(v, F, n, numbers[place]);
      else numbers[place] = number(v, F, n);
    }
  }
  m->stale = m->stale || set;
  return place == given ? DONE : fail(m, "there are %zu states, got %zu numbers", place, given);
}

#define API(name) EXPORTED status name
#define NONE(name, ...) API(name)(__VA_ARGS__) { return DONE; }
EXPORTED text fmi3GetVersion(void) { return "3.0"; }

EXPORTED instance fmi3InstantiateModelExchange(text name, text token, text resources, bool visible, bool logging,
                                               void *environment, logger log) {
  return create(resources, environment, log);
}

EXPORTED instance fmi3InstantiateCoSimulation(text name, text token, text resources, bool visible, bool logging,
                                              bool events, bool early, const reference *r, size_t count,
                                              void *environment, logger log, void *update) {
  model *m = create(resources, environment, log);
  for (size_t k = 0; m && k < m->count; k++)
    if (m->variables[k].kind == 's') {
      fail(m, "the FMU has states and no solver: it is for Model Exchange");
      destroy(m);
      return NULL;
    }
  return m;
}

EXPORTED instance fmi3InstantiateScheduledExecution(text name, text token, text resources, bool visible, bool logging,
                                                    void *environment, logger log, void *clock, void *lock, void *unlock) {
  return NULL;
}

EXPORTED void fmi3FreeInstance(instance m) {
  if (m) destroy(m);
}

NONE(fmi3SetDebugLogging, instance m, bool logging, size_t count, const text *categories)
API(fmi3EnterInitializationMode)(instance i, bool has_tolerance, double tolerance, double start, bool has_stop, double stop) {
  ((model *)i)->time = ((model *)i)->start_time = start;
  return DONE;
}
NONE(fmi3ExitInitializationMode, instance m)
NONE(fmi3EnterEventMode, instance m)
NONE(fmi3EnterContinuousTimeMode, instance m)
NONE(fmi3EnterStepMode, instance m)
NONE(fmi3EnterConfigurationMode, instance m)
NONE(fmi3ExitConfigurationMode, instance m)
NONE(fmi3Terminate, instance m)
NONE(fmi3EvaluateDiscreteStates, instance m)
API(fmi3Reset)(instance i) {
  model *m = i;
  memcpy(m->numbers, m->start, m->bytes);
  m->stale = true;
  m->time = 0;
  return DONE;
}

API(fmi3GetFloat64)(instance m, const reference *r, size_t count, double *values, size_t given) {
  return transfer(m, r, count, values, given, FLOAT64, false);
}
API(fmi3SetFloat64)(instance m, const reference *r, size_t count, const double *values, size_t given) {
  return transfer(m, r, count, (void *)values, given, FLOAT64, true);
}
API(fmi3GetFloat32)(instance m, const reference *r, size_t count, float *values, size_t given) {
  return transfer(m, r, count, values, given, FLOAT32, false);
}
API(fmi3SetFloat32)(instance m, const reference *r, size_t count, const float *values, size_t given) {
  return transfer(m, r, count, (void *)values, given, FLOAT32, true);
}

#define OTHER(kind, type, ...)                                                                                      \
  API(fmi3Get##kind)(instance m, const reference *r, size_t count, __VA_ARGS__ type *values, size_t given) {       \
    return count ? fail(m, "there are no variables of type " #kind) : DONE;                                          \
  }                                                                                                                \
  API(fmi3Set##kind)(instance m, const reference *r, size_t count, __VA_ARGS__ const type *values, size_t given) { \
    return count ? fail(m, "there are no variables of type " #kind) : DONE;                                          \
  }
#define SIZES size_t *sizes,
OTHER(Int8, int8_t)
OTHER(UInt8, uint8_t)
OTHER(Int16, int16_t)
OTHER(UInt16, uint16_t)
OTHER(Int32, int32_t)
OTHER(UInt32, uint32_t)
OTHER(Int64, int64_t)
OTHER(UInt64, uint64_t)
OTHER(Boolean, bool)
OTHER(String, text)
OTHER(Binary, uint8_t *const, SIZES)
#undef OTHER
API(fmi3GetClock)(instance m, const reference *r, size_t count, bool *values) { return count ? FAILED : DONE; }
API(fmi3SetClock)(instance m, const reference *r, size_t count, const bool *values) { return count ? FAILED : DONE; }

API(fmi3GetNumberOfVariableDependencies)(instance m, reference r, size_t *count) {
  return fail(m, "dependencies are those of modelDescription.xml");
}
API(fmi3GetVariableDependencies)(instance m, reference r, size_t *elements, reference *others, size_t *places, int *kinds, size_t count) {
  return fail(m, "dependencies are those of modelDescription.xml");
}

// A state of the FMU: the time, and all numbers.
API(fmi3SerializedFMUStateSize)(instance i, void *state, size_t *size) { return *size = sizeof(double) + ((model *)i)->bytes, DONE; }
API(fmi3GetFMUState)(instance i, void **state) {
  model *m = i;
  if (!*state && !(*state = malloc(sizeof(double) + m->bytes))) return fail(m, "not enough memory");
  memcpy(*state, &m->time, sizeof(double));
  memcpy((char *)*state + sizeof(double), m->numbers, m->bytes);
  return DONE;
}
API(fmi3SetFMUState)(instance i, void *state) {
  model *m = i;
  memcpy(&m->time, state, sizeof(double));
  memcpy(m->numbers, (char *)state + sizeof(double), m->bytes);
  m->stale = true;
  return DONE;
}
API(fmi3FreeFMUState)(instance m, void **state) {
  if (state) free(*state), *state = NULL;
  return DONE;
}
API(fmi3SerializeFMUState)(instance m, void *state, uint8_t *bytes, size_t size) { return memcpy(bytes, state, size), DONE; }
API(fmi3DeserializeFMUState)(instance i, const uint8_t *bytes, size_t size, void **state) {
  model *m = i;
  if (size != sizeof(double) + m->bytes) return fail(m, "a state has %zu bytes, got %zu", sizeof(double) + m->bytes, size);
  if (!*state && !(*state = malloc(size))) return fail(m, "not enough memory");
  return memcpy(*state, bytes, size), DONE;
}

API(fmi3GetDirectionalDerivative)(instance m, const reference *unknowns, size_t unknown, const reference *knowns, size_t known,
                                  const double *seed, size_t seeds, double *result, size_t results) {
  return derive(m, JVP, knowns, known, seed, seeds, unknowns, unknown, result, results);
}
API(fmi3GetAdjointDerivative)(instance m, const reference *unknowns, size_t unknown, const reference *knowns, size_t known,
                              const double *seed, size_t seeds, double *result, size_t results) {
  return derive(m, VJP, unknowns, unknown, seed, seeds, knowns, known, result, results);
}

API(fmi3UpdateDiscreteStates)(instance m, bool *needed, bool *terminate, bool *nominals, bool *changed, bool *defined, double *next) {
  return *needed = *terminate = *nominals = *changed = *defined = false, DONE;
}
API(fmi3CompletedIntegratorStep)(instance m, bool final, bool *events, bool *terminate) { return *events = *terminate = false, DONE; }
API(fmi3SetTime)(instance m, double time) { return ((model *)m)->time = time, DONE; }
API(fmi3SetContinuousStates)(instance m, const double *x, size_t count) { return states(m, 's', (double *)x, count, true); }
API(fmi3GetContinuousStates)(instance m, double *x, size_t count) { return states(m, 's', x, count, false); }
API(fmi3GetContinuousStateDerivatives)(instance m, double *x, size_t count) { return states(m, 'd', x, count, false); }
API(fmi3GetNominalsOfContinuousStates)(instance m, double *x, size_t count) {
  for (size_t n = 0; n < count; n++) x[n] = 1;
  return DONE;
}
NONE(fmi3GetEventIndicators, instance m, double *values, size_t count)
API(fmi3GetNumberOfEventIndicators)(instance m, size_t *count) { return *count = 0, DONE; }
API(fmi3GetNumberOfContinuousStates)(instance i, size_t *count) {
  model *m = i;
  *count = 0;
  for (size_t k = 0; k < m->count; k++) *count += m->variables[k].kind == 's' ? m->variables[k].count : 0;
  return DONE;
}

API(fmi3GetOutputDerivatives)(instance m, const reference *r, size_t count, const int32_t *orders, double *values, size_t given) {
  return fail(m, "outputs have no derivatives by time");
}
API(fmi3DoStep)(instance m, double time, double step, bool no_return, bool *events, bool *terminate, bool *early, double *last) {
  *events = *terminate = *early = false;
  ((model *)m)->time = *last = time + step;
  return DONE;
}
#define CLOCKS(name, ...) API(name)(instance m, const reference *r, size_t count, __VA_ARGS__) { return count ? FAILED : DONE; }
CLOCKS(fmi3GetIntervalDecimal, double *intervals, int *qualifiers)
CLOCKS(fmi3GetIntervalFraction, uint64_t *counters, uint64_t *resolutions, int *qualifiers)
CLOCKS(fmi3GetShiftDecimal, double *shifts)
CLOCKS(fmi3GetShiftFraction, uint64_t *counters, uint64_t *resolutions)
CLOCKS(fmi3SetIntervalDecimal, const double *intervals)
CLOCKS(fmi3SetIntervalFraction, const uint64_t *counters, const uint64_t *resolutions)
CLOCKS(fmi3SetShiftDecimal, const double *shifts)
CLOCKS(fmi3SetShiftFraction, const uint64_t *counters, const uint64_t *resolutions)
API(fmi3ActivateModelPartition)(instance m, reference clock, double time) { return FAILED; }
