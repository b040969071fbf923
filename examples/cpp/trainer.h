// Runs a training that `onnx-backprop compile` has written, in C++17 with only onnxruntime: steps, an evaluation,
// checkpoints that `Trainer.load` reads too, and the trained model.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <vector>

#include "onnxruntime_table.h"

namespace training {
namespace fs = std::filesystem;
using std::string, std::vector;
using Names = vector<string>;

struct Tensor {  // memory of onnxruntime
  string name;
  ort::Value *value = nullptr;
  char *data = nullptr;
  vector<int64_t> dims;
  int type = 0;
  size_t bytes = 0;

  Tensor(const string &name, ort::Value *of) : name(name), value(of) {
    ort::TensorInfo *info;
    size_t rank;
    ort::GetTensorTypeAndShape(value, &info), ort::GetDimensionsCount(info, &rank), dims.resize(rank);
    ort::GetDimensions(info, dims.data(), rank), ort::GetTensorElementType(info, &type), ort::ReleaseTensorInfo(info);
    ort::GetTensorMutableData(value, reinterpret_cast<void **>(&data));
    static const size_t sizes[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8, 8, 16, 2};  // by the number of the type
    bytes = sizes[type];
    for (int64_t d : dims) bytes *= d;
  }
};

inline ort::Allocator *allocator;
inline Tensor tensor(const string &name, const vector<int64_t> &dims, int type) {
  ort::Value *value;
  ort::CreateTensorAsOrtValue(allocator, dims.data(), dims.size(), type, &value);
  return Tensor(name, value);
}

struct Model {
  ort::Session *session;
  ort::Metadata *metadata;
  Names inputs, outputs;

  Model(ort::Env *env, const fs::path &path, ort::SessionOptions *options) {
    ort::CreateSession(env, path.c_str(), options, &session), ort::SessionGetModelMetadata(session, &metadata);
    size_t counts[2];
    char *name;
    ort::SessionGetInputCount(session, &counts[0]), ort::SessionGetOutputCount(session, &counts[1]);
    for (size_t n = 0; n < counts[0]; n++) ort::SessionGetInputName(session, n, allocator, &name), inputs.push_back(name);
    for (size_t n = 0; n < counts[1]; n++) ort::SessionGetOutputName(session, n, allocator, &name), outputs.push_back(name);
  }
  string about(const string &key) const {
    char *text;
    ort::ModelMetadataLookupCustomMetadataMap(metadata, allocator, key.c_str(), &text);
    return text ? text : "";
  }
  vector<Tensor> run(const vector<Tensor> &feeds) const {  // those that it has inputs for
    vector<const char *> given, wanted;
    vector<const ort::Value *> values;
    for (const string &input : inputs)
      for (const Tensor &feed : feeds)
        if (feed.name == input) given.push_back(input.c_str()), values.push_back(feed.value);
    for (const string &output : outputs) wanted.push_back(output.c_str());
    vector<ort::Value *> results(wanted.size());
    ort::Run(session, nullptr, given.data(), values.data(), given.size(), wanted.data(), wanted.size(), results.data());
    vector<Tensor> made;
    for (size_t n = 0; n < results.size(); n++) made.emplace_back(outputs[n], results[n]);
    return made;
  }
};

inline Names split(const string &text, char end) {
  Names parts;
  std::istringstream stream(text);
  for (string part; std::getline(stream, part, end);) parts.push_back(part);
  return parts;
}

inline string content(const fs::path &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write(const fs::path &path, const string &bytes) {  // whole or not at all
  fs::path other = path;
  (std::ofstream(other += ".new", std::ios::binary) << bytes).close();
  fs::rename(other, path);
}

class Trainer {
 public:
  float rate = 1e-3f;
  int steps = 0;
  vector<Tensor> batch;  // what a step is fed, for the caller to fill, of the first lengths that the library was made for

  // library: "-" for standard operators, which need none
  Trainer(const fs::path &folder, const fs::path &library, int threads = 0) : folder(folder) {
    ort::GetAllocatorWithDefaultOptions(&allocator), ort::CreateEnv(3, "training", &env);
    void *handle;
    const bool standard = library == "-";
    ort::CreateSessionOptions(&options), ort::SetIntraOpNumThreads(options, threads);
    ort::DisableMemPattern(options);  // which allocates all of a step once more, in one block
    if (!standard) ort::RegisterCustomOpsLibrary(options, library.string().c_str(), &handle);
    step_model.emplace(env, folder / (standard ? "standard.onnx" : "training.onnx"), options);
    initial.emplace(env, folder / "initial.onnx", options);
    const Names in_place = split(step_model->about("in_place"), '\n');
    for (const Tensor &t : initial->run({})) {
      sets[0].push_back(tensor(t.name, t.dims, t.type));
      std::memcpy(sets[0].back().data, t.data, t.bytes);
      ort::ReleaseValue(t.value);
      // a step overwrites some tensors, and writes the others into the other set
      const bool same = std::find(in_place.begin(), in_place.end(), t.name) != in_place.end();
      sets[1].push_back(same ? sets[0].back() : tensor(t.name, t.dims, t.type));
    }
    for (const string &line : split(step_model->about("feeds"), '\n')) {
      const Names parts = split(line, '\t'), lengths = split(parts[2], ',');
      vector<int64_t> dims;
      for (const string &length : lengths) dims.push_back(std::stoll(length));
      batch.push_back(tensor(parts[0], dims, std::stoi(parts[1])));
    }
    loss.push_back(tensor(step_model->outputs[0], {}, 1));
    others.push_back(tensor(step_model->about("learning_rate"), {}, 1));
    if (!step_model->about("guard").empty()) others.push_back(tensor(step_model->about("guard"), {}, 1));
    for (int set = 0; set < 2; set++) {
      ort::CreateIoBinding(step_model->session, &bindings[set]);
      for (const vector<Tensor> *fed : {&batch, &others, &sets[set]})
        for (const Tensor &t : *fed) ort::BindInput(bindings[set], t.name.c_str(), t.value);
      ort::BindOutput(bindings[set], loss[0].name.c_str(), loss[0].value);
      for (size_t n = 0; n < sets[0].size(); n++)
        ort::BindOutput(bindings[set], step_model->outputs[n + 1].c_str(), sets[1 - set][n].value);
    }
  }
  ~Trainer() {
    for (ort::Binding *binding : bindings) ort::ReleaseBinding(binding);
    for (std::optional<Model> *model : {&step_model, &initial, &evaluation})
      if (*model) ort::ReleaseMetadata((*model)->metadata), ort::ReleaseSession((*model)->session);
    for (size_t n = 0; n < sets[0].size(); n++) {
      if (sets[0][n].value != sets[1][n].value) ort::ReleaseValue(sets[1][n].value);
      ort::ReleaseValue(sets[0][n].value);
    }
    for (vector<Tensor> *fed : {&batch, &others, &loss})
      for (Tensor &t : *fed) ort::ReleaseValue(t.value);
    ort::ReleaseSessionOptions(options), ort::ReleaseEnv(env);
  }
  Trainer(const Trainer &) = delete;

  // A step on the batch; its loss before the update. One that is no finite number leaves the state as it was.
  float step() {
    number(others[0]) = rate;
    if (others.size() > 1) number(others[1]) = 1;
    ort::RunWithBinding(step_model->session, nullptr, bindings[steps % 2]);
    if (!std::isfinite(number(loss[0]))) throw std::runtime_error("the loss is no finite number. Lower the learning rate");
    steps++;
    return number(loss[0]);
  }
  vector<Tensor> &state() { return sets[steps % 2]; }

  // The loss of the batch in inference mode.
  float evaluate() {
    if (!evaluation) evaluation.emplace(env, folder / "evaluation.onnx", options);
    vector<Tensor> feeds = batch;
    feeds.insert(feeds.end(), state().begin(), state().end());
    vector<Tensor> results = evaluation->run(feeds);
    const float result = number(results[0]);
    for (Tensor &t : results) ort::ReleaseValue(t.value);
    return result;
  }
  // The model that came, its weights overwritten where they lie in the file.
  void write_model(const fs::path &path) {
    string bytes = content(folder / "forward.onnx");
    for (const Tensor &t : state()) {
      const string place = initial->about(t.name);
      if (!place.empty()) std::memcpy(&bytes[std::stoull(place)], t.data, t.bytes);
    }
    write(path, bytes);
  }
  // A checkpoint as safetensors.
  void save(const fs::path &path) {
    std::ostringstream header, data;
    header << R"({"__metadata__":{"onnx_backprop":"{\"format\":1,\"epoch\":0,\"batch\":0,\"schedule\":null,\"steps\":)" << steps
           << R"(,\"learning_rate\":)" << rate << R"(}"})";
    for (size_t n = 0, at = 0; n < state().size(); at += state()[n++].bytes) {
      const Tensor &t = state()[n];
      header << "," << described(t) << at << "," << at + t.bytes << "]}";
      data.write(t.data, t.bytes);
    }
    string text = header.str() + "}";
    text.resize((text.size() + 7) / 8 * 8, ' ');
    uint64_t length = text.size();  // on a processor that begins with the lowest byte
    write(path, string(reinterpret_cast<char *>(&length), 8) + text + data.str());
  }
  // Go on from what `save` has written for the same graph.
  void load(const fs::path &path) {
    const string bytes = content(path);
    uint64_t length;
    std::memcpy(&length, bytes.data(), 8);
    const string header = bytes.substr(8, length), word = "steps\\\":";
    const auto number = [&](const string &before) {
      const size_t at = header.find(before);
      if (at == string::npos) throw std::runtime_error(path.string() + " is of another graph, or of another program: no " + before);
      return std::stoull(header.substr(at + before.size()));
    };
    vector<size_t> places;
    for (const Tensor &t : state()) {
      places.push_back(8 + length + number(described(t)));
      if (places.back() + t.bytes > bytes.size()) throw std::runtime_error(path.string() + " ends before " + t.name);
    }
    steps = number(word);
    for (size_t n = 0; n < places.size(); n++) std::memcpy(state()[n].data, &bytes[places[n]], state()[n].bytes);
  }

 private:
  static string described(const Tensor &t) {  // in a checkpoint, up to where its bytes begin
    string shape;
    for (int64_t d : t.dims) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    const char *type = t.type == 1 ? "F32" : t.type == 7 ? "I64" : t.type == 9 ? "BOOL" : "F64";
    return "\"" + t.name + R"(":{"dtype":")" + type + R"(","shape":[)" + shape + R"(],"data_offsets":[)";
  }
  static float &number(Tensor &t) { return *reinterpret_cast<float *>(t.data); }

  fs::path folder;
  ort::Env *env;
  ort::SessionOptions *options;
  std::optional<Model> step_model, initial, evaluation;
  vector<Tensor> sets[2], others, loss;
  ort::Binding *bindings[2];
};
}  // namespace training
