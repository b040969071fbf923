// Trains what `onnx-backprop compile` has written, with the NuGet package Microsoft.ML.OnnxRuntime alone:
//
//   Train FOLDER LIBRARY BATCHES STEPS RATE [THREADS]
//
// LIBRARY is one of FOLDER's, or - for standard operators. BATCHES holds the bytes of one batch after the other, each the
// inputs of the graph in their order. Prints the losses of the steps, then the last batch's in inference mode. Goes on from
// FOLDER/checkpoint.safetensors if that is there, and writes it and FOLDER/trained.onnx.
using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Text;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

public sealed class Trainer {
    readonly string folder;
    readonly InferenceSession session, initial, evaluation;
    readonly RunOptions run = new RunOptions();
    readonly string[] names;  // of the state
    readonly OrtValue[][] sets = new OrtValue[2][];
    readonly OrtIoBinding[] bindings = new OrtIoBinding[2];
    readonly OrtValue loss = Make(TensorElementType.Float), rate = Make(TensorElementType.Float), guard = Make(TensorElementType.Float);
    public readonly Dictionary<string, OrtValue> Batch = new Dictionary<string, OrtValue>();  // for the caller to fill
    public int Steps;
    public float Rate { get => First(rate); set => First(rate) = value; }

    public Trainer(string folder, string library, int threads) {
        this.folder = folder;
        var options = new SessionOptions { IntraOpNumThreads = threads, LogSeverityLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR, EnableMemoryPattern = false };
        if (library != "-") options.RegisterCustomOpLibrary(library);
        session = new InferenceSession(Path.Combine(folder, library == "-" ? "standard.onnx" : "training.onnx"), options);
        initial = new InferenceSession(Path.Combine(folder, "initial.onnx"), options);
        evaluation = new InferenceSession(Path.Combine(folder, "evaluation.onnx"), options);
        var about = session.ModelMetadata.CustomMetadataMap;
        var inPlace = about["in_place"].Split('\n');
        names = initial.OutputNames.ToArray();
        sets[0] = initial.Run(run, new Dictionary<string, OrtValue>(), names).ToArray();
        // a step overwrites some tensors, and writes the others into the other set
        sets[1] = names.Zip(sets[0], (name, first) => inPlace.Contains(name) ? first : Make(Type(first), Shape(first))).ToArray();
        foreach (var line in about["feeds"].Split('\n')) {
            var parts = line.Split('\t');
            var shape = parts[2].Split(new[] { ',' }, StringSplitOptions.RemoveEmptyEntries).Select(long.Parse).ToArray();
            Batch[parts[0]] = Make((TensorElementType)int.Parse(parts[1]), shape);
        }
        for (int set = 0; set < 2; set++) {
            var binding = bindings[set] = session.CreateIoBinding();
            foreach (var pair in Batch) binding.BindInput(pair.Key, pair.Value);
            binding.BindInput(about["learning_rate"], rate);
            if (about["guard"] != "") binding.BindInput(about["guard"], guard);
            binding.BindOutput(session.OutputNames[0], loss);
            for (int n = 0; n < names.Length; n++) {
                binding.BindInput(names[n], sets[set][n]);
                binding.BindOutput(session.OutputNames[n + 1], sets[1 - set][n]);
            }
        }
    }

    static OrtValue Make(TensorElementType type, params long[] shape) =>
        OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, type, shape);
    static TensorElementType Type(OrtValue value) => value.GetTensorTypeAndShape().ElementDataType;
    static long[] Shape(OrtValue value) => value.GetTensorTypeAndShape().Shape;
    static ref float First(OrtValue value) => ref value.GetTensorMutableDataAsSpan<float>()[0];
    public OrtValue[] State => sets[Steps % 2];
    // A step on the batch; its loss before the update. One that is no finite number leaves the state as it was.
    public float Step() {
        First(guard) = 1;
        session.RunWithBinding(run, bindings[Steps % 2]);
        float value = First(loss);
        if (float.IsNaN(value) || float.IsInfinity(value)) throw new ArithmeticException($"the loss is {value}. Lower the learning rate");
        Steps++;
        return value;
    }
    // The loss of the batch in inference mode.
    public float Evaluate() {
        var feeds = Batch.Concat(names.Zip(State, (name, value) => new KeyValuePair<string, OrtValue>(name, value)));
        var read = feeds.Where(pair => evaluation.InputNames.Contains(pair.Key)).ToDictionary(pair => pair.Key, pair => pair.Value);
        using (var results = evaluation.Run(run, read, evaluation.OutputNames)) return First(results[0]);
    }
    // The model that came, its weights overwritten where they lie in the file.
    public void Export(string path) {
        var bytes = File.ReadAllBytes(Path.Combine(folder, "forward.onnx"));
        foreach (var place in initial.ModelMetadata.CustomMetadataMap)
            State[Array.IndexOf(names, place.Key)].GetTensorMutableRawData().CopyTo(bytes.AsSpan(int.Parse(place.Value)));
        Replace(path, bytes);
    }
    // A checkpoint as safetensors, which `Trainer.load` of Python reads too.
    public void Save(string path) {
        var header = new StringBuilder("{\"__metadata__\":{\"onnx_backprop\":\"{\\\"format\\\":1,\\\"epoch\\\":0,\\\"batch\\\":0,");
        header.Append("\\\"schedule\\\":null,\\\"steps\\\":" + Steps + ",\\\"learning_rate\\\":" + Rate.ToString("R", CultureInfo.InvariantCulture) + "}\"}");
        var data = new MemoryStream();
        for (int n = 0; n < names.Length; n++) {
            header.Append("," + Described(n) + data.Length);
            var bytes = State[n].GetTensorMutableRawData().ToArray();
            data.Write(bytes, 0, bytes.Length);
            header.Append("," + data.Length + "]}");
        }
        var text = Encoding.UTF8.GetBytes(header.Append("}").ToString());
        Replace(path, BitConverter.GetBytes((long)text.Length).Concat(text).Concat(data.ToArray()).ToArray());
    }
    // Go on from what `Save` has written for the same graph.
    public void Load(string path) {
        var bytes = File.ReadAllBytes(path);
        int start = 8 + (int)BitConverter.ToInt64(bytes, 0);
        var header = Encoding.UTF8.GetString(bytes, 8, start - 8);
        var places = Enumerable.Range(0, names.Length).Select(n => start + Number(header, Described(n))).ToArray();
        Steps = Number(header, "steps\\\":");
        for (int n = 0; n < names.Length; n++) {
            var value = State[n].GetTensorMutableRawData();
            bytes.AsSpan(places[n], value.Length).CopyTo(value);
        }
    }

    string Described(int n) {  // up to where the bytes of a tensor begin
        var types = new Dictionary<TensorElementType, string> {
            [TensorElementType.Float] = "F32", [TensorElementType.Double] = "F64", [TensorElementType.Int64] = "I64", [TensorElementType.Bool] = "BOOL" };
        var (type, shape) = (types[Type(sets[0][n])], string.Join(",", Shape(sets[0][n])));
        return $"\"{names[n]}\":{{\"dtype\":\"{type}\",\"shape\":[{shape}],\"data_offsets\":[";
    }
    static int Number(string text, string before) {
        int at = text.IndexOf(before, StringComparison.Ordinal) + before.Length;
        if (at < before.Length) throw new InvalidDataException($"the checkpoint is of another graph, or of another program: no {before}");
        return int.Parse(new string(text.Substring(at).TakeWhile(char.IsDigit).ToArray()));
    }
    static void Replace(string path, byte[] bytes) {  // whole or not at all
        File.WriteAllBytes(path + ".new", bytes);
        if (File.Exists(path)) File.Replace(path + ".new", path, null); else File.Move(path + ".new", path);
    }

    public static void Main(string[] given) {
        var checkpoint = Path.Combine(given[0], "checkpoint.safetensors");
        var trainer = new Trainer(given[0], given[1], given.Length > 5 ? int.Parse(given[5]) : 0);
        trainer.Rate = float.Parse(given[4], CultureInfo.InvariantCulture);
        if (File.Exists(checkpoint)) trainer.Load(checkpoint);
        using (var batches = new BinaryReader(File.OpenRead(given[2])))
            for (int n = 0; n < int.Parse(given[3]); n++) {
                foreach (var input in trainer.Batch.Values) {
                    var place = input.GetTensorMutableRawData();
                    var bytes = batches.ReadBytes(place.Length);
                    if (bytes.Length < place.Length) throw new EndOfStreamException("BATCHES ends before the last step");
                    bytes.CopyTo(place);
                }
                Console.WriteLine(trainer.Step().ToString("R", CultureInfo.InvariantCulture));
            }
        Console.WriteLine("evaluation " + trainer.Evaluate().ToString("R", CultureInfo.InvariantCulture));
        trainer.Save(checkpoint);
        trainer.Export(Path.Combine(given[0], "trained.onnx"));
    }
}
