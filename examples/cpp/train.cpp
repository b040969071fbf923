// Trains the output of `onnx-backprop compile` without Python.
//
//   train FOLDER LIBRARY BATCHES STEPS RATE [THREADS]
//
// LIBRARY is one of FOLDER's, or - for standard operators. BATCHES holds the bytes of the batches one after the other,
// each with the inputs of the graph in order. Prints the losses of the steps, then the last batch's in inference mode; seconds
// of processor time of the fastest step go to the standard error. Continues from FOLDER/checkpoint.safetensors if it
// exists, and writes it and FOLDER/trained.onnx.
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "trainer.h"

int main(int count, char **arguments) try {
  if (count < 6) return std::fprintf(stderr, "train FOLDER LIBRARY BATCHES STEPS RATE [THREADS]\n"), 2;
  const training::fs::path folder = arguments[1], checkpoint = folder / "checkpoint.safetensors";
  training::Trainer trainer(folder, arguments[2], count > 6 ? std::atoi(arguments[6]) : 0);
  trainer.rate = std::strtof(arguments[5], nullptr);
  if (training::fs::exists(checkpoint)) trainer.load(checkpoint);
  std::ifstream batches(arguments[3], std::ios::binary);
  double least = 1e9;
  for (int n = 0; n < std::atoi(arguments[4]); n++) {
    for (training::Tensor &input : trainer.batch)
      if (!batches.read(input.data, input.bytes)) throw std::runtime_error("BATCHES ends before the last step");
    const std::clock_t start = std::clock();
    std::printf("%.9g\n", trainer.step());
    least = std::min(least, double(std::clock() - start) / CLOCKS_PER_SEC);
  }
  std::printf("evaluation %.9g\n", trainer.evaluate());
  std::fprintf(stderr, "%g\n", least);
  trainer.save(checkpoint);
  trainer.write_model(folder / "trained.onnx");
  return 0;
} catch (const std::exception &error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
