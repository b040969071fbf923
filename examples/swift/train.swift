// Trains the output of `onnx-backprop compile` on macOS or iOS with only the package onnxruntime-swift-package-manager:
//   train FOLDER LIBRARY BATCHES STEPS RATE [THREADS]
// LIBRARY: of FOLDER, or - for standard operators. BATCHES holds the bytes of one batch after the other, each the inputs of
// the graph in their order. Prints the losses of the steps, then the last batch's in inference mode. Continues from
// FOLDER/checkpoint.safetensors if it exists, and writes it and FOLDER/trained.onnx.
import Foundation
import OnnxRuntimeBindings

struct Failure: Error, CustomStringConvertible { let description: String }

struct About: Decodable {  // what training.json says of a graph
  struct Rate: Decodable { let name: String }
  struct Input: Decodable { let dtype: String }
  struct Entry: Decodable { let dtype: String, dims: [Int], new: String, at: Int?, fill: Double?, copy: String? }
  let loss: String, learningRate: Rate, guardName: String, in_place: [String]
  let inputs: [String: Input], feeds: [String: [Int]], state: [String: Entry]
  enum CodingKeys: String, CodingKey { case loss, learningRate, guardName = "guard", in_place, inputs, feeds, state }
}
struct Variable {  // a tensor and its memory, which onnxruntime reads and writes where it lies
  let dtype: String, dims: [Int], data: NSMutableData, value: ORTValue
  init(_ dtype: String, _ dims: [Int]) throws {
    let types: [String: (ORTTensorElementDataType, Int)] = ["float32": (.float, 4), "int64": (.int64, 8), "int32": (.int32, 4), "uint8": (.uInt8, 1)]
    guard let (type, size) = types[dtype], let data = NSMutableData(length: dims.reduce(size, *)) else {
      throw Failure(description: "\(dtype) is no element type of onnxruntime's values in Swift")
    }
    (self.dtype, self.dims, self.data) = (dtype, dims, data)
    value = try ORTValue(tensorData: data, elementType: type, shape: dims.map { NSNumber(value: $0) })
  }
  var number: Float {
    get { data.bytes.load(as: Float.self) }
    nonmutating set { data.mutableBytes.storeBytes(of: newValue, as: Float.self) }
  }
  func fill(_ bytes: Data) throws {
    guard bytes.count == data.length else { throw Failure(description: "expected \(data.length) bytes, got \(bytes.count)") }
    data.replaceBytes(in: NSRange(location: 0, length: data.length), withBytes: (bytes as NSData).bytes)
  }
}

final class Trainer {
  let folder: URL, about: About, forward: Data, session: ORTSession, evaluation: ORTSession
  let order: [String]  // of the inputs of a batch
  let batch: [String: Variable], loss: Variable, rate: Variable, raised: Variable
  var sets: [[String: Variable]] = [[:], [:]], steps = 0
  var state: [String: Variable] { sets[steps % 2] }

  init(_ folder: URL, _ library: String, threads: Int32) throws {
    self.folder = folder
    about = try JSONDecoder().decode(About.self, from: Data(contentsOf: folder.appendingPathComponent("training.json")))
    forward = try Data(contentsOf: folder.appendingPathComponent("forward.onnx"))
    let env = try ORTEnv(loggingLevel: .error), options = try ORTSessionOptions()
    try options.setIntraOpNumThreads(threads)
    if library != "-" {
      guard let handle = dlopen(library, RTLD_NOW), let symbol = dlsym(handle, "RegisterCustomOps") else {
        throw Failure(description: String(cString: dlerror()))
      }
      try options.registerCustomOps(functionPointer: unsafeBitCast(symbol, to: ORTCAPIRegisterCustomOpsFnPtr.self))
    }
    let step = folder.appendingPathComponent(library == "-" ? "standard.onnx" : "training.onnx")
    session = try ORTSession(env: env, modelPath: step.path, sessionOptions: options)
    evaluation = try ORTSession(env: env, modelPath: folder.appendingPathComponent("evaluation.onnx").path, sessionOptions: nil)
    order = try session.inputNames().filter(about.feeds.keys.contains)
    let (inputs, feeds) = (about.inputs, about.feeds)
    batch = try Dictionary(uniqueKeysWithValues: order.map { ($0, try Variable(inputs[$0]!.dtype, feeds[$0]!)) })
    (loss, rate, raised) = (try Variable("float32", []), try Variable("float32", []), try Variable("float32", []))
    for (name, entry) in about.state {
      let first = try Variable(entry.dtype, entry.dims)
      if let at = entry.at { try first.fill(forward.subdata(in: at..<at + first.data.length)) }
      if let fill = entry.fill, fill != 0 {
        guard entry.dtype == "float32" else { throw Failure(description: "'\(name)' starts with \(fill) in \(entry.dtype)") }
        let count = first.data.length / 4
        try first.fill([Float](repeating: Float(fill), count: count).withUnsafeBytes { Data($0) })
      }
      // a step overwrites some tensors, and writes the others into the other set
      sets[0][name] = first
      sets[1][name] = library != "-" && about.in_place.contains(name) ? first : try Variable(entry.dtype, entry.dims)
    }
    for (name, entry) in about.state { if let copy = entry.copy { try sets[0][name]!.fill(sets[0][copy]!.data as Data) } }
  }

  /// A step on the batch; its loss before the update. One that is no finite number leaves the state as it was.
  func step() throws -> Float {
    raised.number = 1
    var inputs = batch.merging(state) { first, _ in first }
    inputs[about.learningRate.name] = rate
    if try session.inputNames().contains(about.guardName) { inputs[about.guardName] = raised }
    var outputs = [about.loss: loss.value]
    for (name, variable) in sets[1 - steps % 2] { outputs[about.state[name]!.new] = variable.value }
    try session.run(withInputs: inputs.mapValues(\.value), outputs: outputs, runOptions: nil)
    guard loss.number.isFinite else { throw Failure(description: "the loss is \(loss.number). Lower the learning rate") }
    steps += 1
    return loss.number
  }
  /// The loss of the batch in inference mode.
  func evaluate() throws -> Float {
    let known = Set(try evaluation.inputNames())
    let inputs = batch.merging(state) { first, _ in first }.filter { known.contains($0.key) }
    try evaluation.run(withInputs: inputs.mapValues(\.value), outputs: [about.loss: loss.value], runOptions: nil)
    return loss.number
  }
  /// The model that came, its weights overwritten where they lie in the file.
  func export(_ file: URL) throws {
    var bytes = forward
    for (name, entry) in about.state {
      if let at = entry.at { bytes.replaceSubrange(at..<at + state[name]!.data.length, with: state[name]!.data as Data) }
    }
    try bytes.write(to: file, options: .atomic)
  }
  /// A checkpoint as safetensors, which `Trainer.load` of Python reads too.
  func save(_ file: URL) throws {
    let types = ["float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8"]
    let notes = "{\"format\":1,\"epoch\":0,\"batch\":0,\"schedule\":null,\"steps\":\(steps),\"learning_rate\":\(rate.number)}"
    var header: [String: Any] = ["__metadata__": ["onnx_backprop": notes]], data = Data()
    for (name, variable) in state {
      let offsets = [data.count, data.count + variable.data.length]
      header[name] = ["dtype": types[variable.dtype]!, "shape": variable.dims, "data_offsets": offsets] as [String: Any]
      data += variable.data as Data
    }
    let text = try JSONSerialization.data(withJSONObject: header)
    let length = withUnsafeBytes(of: UInt64(text.count).littleEndian) { Data($0) }
    try (length + text + data).write(to: file, options: .atomic)
  }
  /// Go on from what `save` has written for the same graph.
  func load(_ file: URL) throws {
    let bytes = try Data(contentsOf: file), other = Failure(description: "\(file.path) is of another graph, or of another program")
    let start = 8 + bytes.prefix(8).reversed().reduce(0) { $0 << 8 | Int($1) }
    guard let header = try JSONSerialization.jsonObject(with: bytes.subdata(in: 8..<start)) as? [String: [String: Any]],
      let notes = header["__metadata__"]?["onnx_backprop"] as? String,
      let told = try JSONSerialization.jsonObject(with: Data(notes.utf8)) as? [String: Any], let count = told["steps"] as? Int
    else { throw other }
    for (name, variable) in state where (header[name]?["shape"] as? [Int]) != variable.dims { throw other }
    steps = count
    for (name, variable) in state {
      guard let offsets = header[name]?["data_offsets"] as? [Int] else { throw other }
      try variable.fill(bytes.subdata(in: start + offsets[0]..<start + offsets[1]))
    }
  }
}

let given = CommandLine.arguments, folder = URL(fileURLWithPath: given[1]), checkpoint = folder.appendingPathComponent("checkpoint.safetensors")
let trainer = try Trainer(folder, given[2], threads: given.count > 6 ? Int32(given[6])! : 0)
trainer.rate.number = Float(given[5])!
if FileManager.default.fileExists(atPath: checkpoint.path) { try trainer.load(checkpoint) }
let batches = try FileHandle(forReadingFrom: URL(fileURLWithPath: given[3]))
for _ in 0..<Int(given[4])! {
  for name in trainer.order { try trainer.batch[name]!.fill(batches.readData(ofLength: trainer.batch[name]!.data.length)) }
  print(try trainer.step())
}
print("evaluation", try trainer.evaluate())
try trainer.save(checkpoint)
try trainer.export(folder.appendingPathComponent("trained.onnx"))
