"""Train a small network on Fashion-MNIST with TensorFlow's MirroredStrategy: one process, a copy on every GPU.

    pip install tensorflow
    python mirrored_strategy.py --devices 2

Without GPUs, TensorFlow divides the CPU into logical devices. The network is that of one_gpu.py. TensorFlow draws other
random numbers than PyTorch, so the weights and the order of the images differ. With `--start FILE`, the program takes
both from a file of NumPy arrays, and then prints the losses of one_gpu.py, up to rounding error.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before the import: no notes about the CPU

import numpy as np
import tensorflow as tf

DATA = Path(__file__).parent / "../../data"  # the images that come with the course


def build_model():
    """Images (N, 28, 28, 1) -> logits (N, 10). TensorFlow puts the channels last."""
    return tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            tf.keras.layers.Conv2D(32, 5, padding="same"),
            tf.keras.layers.GroupNormalization(8, epsilon=1e-5),  # PyTorch's default, where that of Keras is 1e-3
            tf.keras.layers.ReLU(),
            tf.keras.layers.MaxPool2D(4),
            tf.keras.layers.Permute((3, 1, 2)),  # PyTorch's order, so that its weights fit the next layer
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, on all devices together")
    parser.add_argument("--max-steps", type=int, help="stop after this many steps, to try the program")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder that contains FashionMNIST/raw")
    parser.add_argument("--devices", type=int, default=2, help="GPUs, or logical devices on a machine without GPUs")
    parser.add_argument("--start", type=Path, help="weights (PyTorch's names and shapes) and orders (epochs, images)")
    parser.add_argument("--record", type=Path, help="the file for all losses and the gradients of the first step")
    return parser.parse_args()


def find_devices(count):
    """The names of `count` devices. Call it before TensorFlow computes anything."""
    if tf.config.list_physical_devices("GPU"):
        return [f"GPU:{number}" for number in range(count)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    return [f"CPU:{number}" for number in range(count)]


def read(folder, name):
    """Images (N, 28, 28, 1) between 0 and 1, and labels (N,)."""
    raw = folder / "FashionMNIST" / "raw"
    images = np.fromfile(raw / f"{name}-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 28, 28, 1)
    labels = np.fromfile(raw / f"{name}-labels-idx1-ubyte", np.uint8)[8:]
    return (images / 255).astype(np.float32), labels.astype(np.int64)


def to_tensorflow(weight):
    """PyTorch's (out, in, height, width) -> (height, width, in, out), and (out, in) -> (in, out)."""
    return weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T


def main():
    args = parse_arguments()
    strategy = tf.distribute.MirroredStrategy(find_devices(args.devices))
    train_images, train_labels = read(args.data, "train")
    test_images, test_labels = read(args.data, "t10k")
    start = dict(np.load(args.start)) if args.start else {}
    orders = start.pop("orders", None)

    tf.keras.utils.set_random_seed(0)
    with strategy.scope():  # variables that are made here get a copy on every device
        model = build_model()
        optimizer = tf.keras.optimizers.SGD(0.002, momentum=0.9)
        optimizer.build(model.trainable_variables)  # makes its own variables here and not in the first step
    if start:
        model.set_weights([to_tensorflow(weight) for weight in start.values()])

    def step(images, labels):
        """What each device does with its share of the batch."""
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_sum(losses) / args.batch_size  # of the whole batch, because apply adds the gradients up
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss, gradients

    @tf.function
    def train_step(images, labels):
        loss, gradients = strategy.run(step, (images, labels))
        total = [strategy.reduce("SUM", gradient, axis=None) for gradient in gradients]
        return strategy.reduce("SUM", loss, axis=None), total

    steps = 0
    record = {"losses": []}
    for epoch in range(args.epochs):
        order = np.random.permutation(len(train_images)) if orders is None else orders[epoch]
        batches = tf.data.Dataset.from_tensor_slices((train_images[order], train_labels[order]))
        batches = batches.batch(args.batch_size, drop_remainder=True)
        losses = []
        for images, labels in strategy.experimental_distribute_dataset(batches):  # each device gets a share
            loss, gradients = train_step(images, labels)
            losses.append(loss)
            steps += 1
            if steps == 1:
                for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                    record[variable.path] = gradient
            if steps == args.max_steps:
                break
        outputs = model.predict(test_images, args.batch_size, verbose=0)
        test_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(test_labels, outputs).numpy().mean()
        accuracy = (outputs.argmax(axis=1) == test_labels).mean()
        train_loss = np.mean(losses)
        print(
            f"epoch {epoch} | loss {train_loss:.3f} | test loss {test_loss:.3f} | accuracy {accuracy:.1%}", flush=True
        )
        record["losses"] += losses
        if steps == args.max_steps:
            break
    if args.record:
        np.savez(args.record, **record)


if __name__ == "__main__":
    main()
