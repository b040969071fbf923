// Trains what `onnx-backprop compile` has written, with onnxruntime's jar alone (com.microsoft.onnxruntime:onnxruntime):
//   java -cp onnxruntime.jar Train.java FOLDER LIBRARY BATCHES STEPS RATE [THREADS]
// LIBRARY is one of FOLDER's, or - for standard operators. BATCHES holds the bytes of one batch after the other, each the
// inputs of the graph in their order. Prints the losses of the steps, then the last batch's in inference mode. Goes on from
// FOLDER/checkpoint.safetensors if that is there, and writes it and FOLDER/trained.onnx.
import ai.onnxruntime.*;
import java.io.*;
import java.nio.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;

public class Train {
  record Variable(OnnxTensor tensor, ByteBuffer data) {  // memory that onnxruntime reads and writes where it lies
    static Variable of(OnnxJavaType type, long... shape) throws OrtException {
      int bytes = type.size;
      for (long length : shape) bytes = Math.multiplyExact(bytes, (int) length);
      ByteBuffer data = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
      return new Variable(OnnxTensor.createTensor(ENV, data, shape, type), data);
    }
    byte[] bytes() {
      byte[] copy = new byte[data.capacity()];
      data.get(0, copy);
      return copy;
    }
  }
  static final OrtEnvironment ENV = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR);
  final Path folder;
  final OrtSession session, initial, evaluation;
  final Map<String, Variable> batch = new LinkedHashMap<>();  // what a step is fed, for the caller to fill
  final Variable loss = Variable.of(OnnxJavaType.FLOAT), rate = Variable.of(OnnxJavaType.FLOAT), guard = Variable.of(OnnxJavaType.FLOAT);
  final List<Map<String, Variable>> sets = List.of(new LinkedHashMap<>(), new LinkedHashMap<>());
  final List<Map<String, OnnxTensor>> inputs = List.of(new HashMap<>(), new HashMap<>()), outputs = List.of(new HashMap<>(), new HashMap<>());
  int steps = 0;
  Train(Path folder, String library, int threads) throws OrtException {
    this.folder = folder;
    OrtSession.SessionOptions options = new OrtSession.SessionOptions();
    options.setIntraOpNumThreads(threads);
    options.setMemoryPatternOptimization(false);  // which allocates all of a step once more, in one block
    if (!library.equals("-")) options.registerCustomOpLibrary(library);
    session = ENV.createSession(folder.resolve(library.equals("-") ? "standard.onnx" : "training.onnx").toString(), options);
    initial = ENV.createSession(folder.resolve("initial.onnx").toString());
    evaluation = ENV.createSession(folder.resolve("evaluation.onnx").toString());
    Map<String, String> about = session.getMetadata().getCustomMetadata();
    List<String> inPlace = List.of(about.get("in_place").split("\n"));
    try (OrtSession.Result start = initial.run(Map.of())) {
      for (Map.Entry<String, OnnxValue> entry : start) {
        TensorInfo info = (TensorInfo) entry.getValue().getInfo();
        Variable first = Variable.of(info.type, info.getShape());
        first.data.duplicate().put(((OnnxTensor) entry.getValue()).getByteBuffer());
        // a step overwrites some tensors, and writes the others into the other set
        sets.get(0).put(entry.getKey(), first);
        sets.get(1).put(entry.getKey(), inPlace.contains(entry.getKey()) ? first : Variable.of(info.type, info.getShape()));
      }
    }
    for (String line : about.get("feeds").split("\n")) {
      String[] parts = line.split("\t", -1);
      long[] shape = Arrays.stream(parts[2].split(",")).filter(d -> !d.isEmpty()).mapToLong(Long::parseLong).toArray();
      batch.put(parts[0], Variable.of(OnnxJavaType.mapFromInt(Integer.parseInt(parts[1])), shape));
    }
    for (int set = 0; set < 2; set++) {
      Map<String, OnnxTensor> fed = inputs.get(set);
      batch.forEach((name, variable) -> fed.put(name, variable.tensor));
      sets.get(set).forEach((name, variable) -> fed.put(name, variable.tensor));
      fed.put(about.get("learning_rate"), rate.tensor);
      if (!about.get("guard").isEmpty()) fed.put(about.get("guard"), guard.tensor);
      Iterator<String> names = session.getOutputNames().iterator();
      outputs.get(set).put(names.next(), loss.tensor);
      for (Variable variable : sets.get(1 - set).values()) outputs.get(set).put(names.next(), variable.tensor);
    }
  }
  Map<String, Variable> state() { return sets.get(steps % 2); }
  // A step on the batch; its loss before the update. One that is no finite number leaves the state as it was.
  float step() throws OrtException {
    guard.data.putFloat(0, 1);
    session.run(inputs.get(steps % 2), Set.of(), outputs.get(steps % 2)).close();
    float value = loss.data.getFloat(0);
    if (!Float.isFinite(value)) throw new ArithmeticException("the loss is " + value + ". Lower the learning rate");
    steps++;
    return value;
  }
  float evaluate() throws OrtException {  // the loss of the batch in inference mode
    Map<String, OnnxTensor> fed = new HashMap<>(inputs.get(steps % 2));
    fed.keySet().retainAll(evaluation.getInputNames());
    try (OrtSession.Result result = evaluation.run(fed)) {
      return ((OnnxTensor) result.get(0)).getFloatBuffer().get(0);
    }
  }
  void export(Path path) throws IOException, OrtException {  // the weights overwritten where they lie in the file
    ByteBuffer model = ByteBuffer.wrap(Files.readAllBytes(folder.resolve("forward.onnx")));
    for (Map.Entry<String, String> place : initial.getMetadata().getCustomMetadata().entrySet())
      model.put(Integer.parseInt(place.getValue()), state().get(place.getKey()).bytes());
    replace(path, model.array());
  }
  void save(Path path) throws IOException {  // a checkpoint as safetensors, which `Trainer.load` of Python reads too
    StringBuilder header = new StringBuilder("{\"__metadata__\":{\"onnx_backprop\":\"{\\\"format\\\":1,\\\"epoch\\\":0,\\\"batch\\\":0,");
    header.append("\\\"schedule\\\":null,\\\"steps\\\":" + steps + ",\\\"learning_rate\\\":" + rate.data.getFloat(0) + "}\"}");
    ByteArrayOutputStream data = new ByteArrayOutputStream();
    for (Map.Entry<String, Variable> entry : state().entrySet()) {
      header.append("," + described(entry.getKey(), entry.getValue()) + data.size());
      data.writeBytes(entry.getValue().bytes());
      header.append("," + data.size() + "]}");
    }
    byte[] text = header.append("}").toString().getBytes(StandardCharsets.UTF_8);
    ByteBuffer file = ByteBuffer.allocate(8 + text.length + data.size()).order(ByteOrder.LITTLE_ENDIAN);
    replace(path, file.putLong(text.length).put(text).put(data.toByteArray()).array());
  }
  void load(Path path) throws IOException {  // go on from what `save` has written for the same graph
    ByteBuffer file = ByteBuffer.wrap(Files.readAllBytes(path)).order(ByteOrder.LITTLE_ENDIAN);
    int start = 8 + (int) file.getLong(0);
    String header = new String(file.array(), 8, start - 8, StandardCharsets.UTF_8);
    steps = number(header, "steps\\\":");
    for (Map.Entry<String, Variable> entry : state().entrySet()) {
      int at = start + number(header, described(entry.getKey(), entry.getValue()));
      entry.getValue().data.put(0, file.array(), at, entry.getValue().data.capacity());
    }
  }
  static String described(String name, Variable variable) {  // up to where its bytes begin
    String type = Map.of(OnnxJavaType.FLOAT, "F32", OnnxJavaType.DOUBLE, "F64", OnnxJavaType.INT64, "I64", OnnxJavaType.BOOL, "BOOL").get(variable.tensor.getInfo().type);
    String shape = Arrays.toString(variable.tensor.getInfo().getShape()).replace(" ", "");
    return "\"" + name + "\":{\"dtype\":\"" + type + "\",\"shape\":" + shape + ",\"data_offsets\":[";
  }
  static int number(String text, String before) throws IOException {
    if (!text.contains(before)) throw new IOException("the checkpoint is of another graph, or of another program: no " + before);
    return new Scanner(text.substring(text.indexOf(before) + before.length())).useDelimiter("\\D+").nextInt();
  }
  static void replace(Path path, byte[] bytes) throws IOException {  // whole or not at all
    Files.move(Files.write(Path.of(path + ".new"), bytes), path, StandardCopyOption.REPLACE_EXISTING);
  }

  public static void main(String[] given) throws Exception {
    Path folder = Path.of(given[0]), checkpoint = folder.resolve("checkpoint.safetensors");
    Train trainer = new Train(folder, given[1], given.length > 5 ? Integer.parseInt(given[5]) : 0);
    trainer.rate.data.putFloat(0, Float.parseFloat(given[4]));
    if (Files.exists(checkpoint)) trainer.load(checkpoint);
    DataInputStream batches = new DataInputStream(new BufferedInputStream(new FileInputStream(given[2])));
    for (int n = 0; n < Integer.parseInt(given[3]); n++) {
      for (Variable input : trainer.batch.values()) {
        byte[] values = new byte[input.data.capacity()];
        batches.readFully(values);
        input.data.put(0, values);
      }
      System.out.println(trainer.step());
    }
    System.out.println("evaluation " + trainer.evaluate());
    trainer.save(checkpoint);
    trainer.export(folder.resolve("trained.onnx"));
  }
}
