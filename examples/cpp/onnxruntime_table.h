// The functions of onnxruntime that a training needs, by their documented positions in its table, which never change.
// A function throws the message of its OrtStatus. With the headers of an onnxruntime release this file is not needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ort {
#ifdef _WIN32
using Char = wchar_t;
#else
using Char = char;
#endif
struct Env; struct Status; struct Session; struct SessionOptions; struct Value; struct RunOptions; struct TensorInfo;
struct MemoryInfo; struct Metadata; struct Binding;
struct Allocator {
  uint32_t version;
  void *(*alloc)(Allocator *, size_t);
  void (*free)(Allocator *, void *);
  const MemoryInfo *(*info)(const Allocator *);
};
struct Base {
  void *const *(*table)(uint32_t version);
  const char *(*version)();
};
extern "C" const Base *OrtGetApiBase();
inline void *const *table() {
  static void *const *found = OrtGetApiBase()->table(18);
  if (!found) throw std::runtime_error("onnxruntime is older than 1.18");
  return found;
}

template <int position, typename... Arguments>
struct Function {
  void operator()(Arguments... arguments) const {
    Status *status = reinterpret_cast<Status *(*)(Arguments...)>(table()[position])(arguments...);
    if (!status) return;
    std::string text = reinterpret_cast<const char *(*)(Status *)>(table()[2])(status);
    reinterpret_cast<void (*)(Status *)>(table()[93])(status);
    throw std::runtime_error(text);
  }
};
template <int position, typename Argument>
struct Release {
  void operator()(Argument *argument) const { reinterpret_cast<void (*)(Argument *)>(table()[position])(argument); }
};

inline Function<3, int, const char *, Env **> CreateEnv;  // the severity from which on it logs, its name
inline Function<7, Env *, const Char *, SessionOptions *, Session **> CreateSession;
inline Function<9, Session *, RunOptions *, const char *const *, const Value *const *, size_t, const char *const *, size_t,
                Value **> Run;
inline Function<10, SessionOptions **> CreateSessionOptions;
inline Function<17, SessionOptions *> DisableMemPattern;
inline Function<24, SessionOptions *, int> SetIntraOpNumThreads;
inline Function<29, SessionOptions *, const char *, void **> RegisterCustomOpsLibrary;
inline Function<30, Session *, size_t *> SessionGetInputCount;
inline Function<31, Session *, size_t *> SessionGetOutputCount;
inline Function<36, Session *, size_t, Allocator *, char **> SessionGetInputName;
inline Function<37, Session *, size_t, Allocator *, char **> SessionGetOutputName;
inline Function<48, Allocator *, const int64_t *, size_t, int, Value **> CreateTensorAsOrtValue;
inline Function<51, Value *, void **> GetTensorMutableData;
inline Function<60, TensorInfo *, int *> GetTensorElementType;
inline Function<61, TensorInfo *, size_t *> GetDimensionsCount;
inline Function<62, TensorInfo *, int64_t *, size_t> GetDimensions;
inline Function<65, Value *, TensorInfo **> GetTensorTypeAndShape;
inline Function<78, Allocator **> GetAllocatorWithDefaultOptions;
inline Function<111, Session *, Metadata **> SessionGetModelMetadata;
inline Function<116, Metadata *, Allocator *, const char *, char **> ModelMetadataLookupCustomMetadataMap;
inline Function<133, Session *, RunOptions *, Binding *> RunWithBinding;
inline Function<134, Session *, Binding **> CreateIoBinding;
inline Function<136, Binding *, const char *, Value *> BindInput;
inline Function<137, Binding *, const char *, Value *> BindOutput;
inline Release<92, Env> ReleaseEnv;
inline Release<95, Session> ReleaseSession;
inline Release<96, Value> ReleaseValue;
inline Release<99, TensorInfo> ReleaseTensorInfo;
inline Release<100, SessionOptions> ReleaseSessionOptions;
inline Release<118, Metadata> ReleaseMetadata;
inline Release<135, Binding> ReleaseBinding;
}  // namespace ort
