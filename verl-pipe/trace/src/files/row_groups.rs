//! Row groups of a Parquet file, with columns encoded in parallel.
//!
//! Rows are buffered until there are enough for a row group. Then each column is encoded on its own, and the calling
//! thread appends the encoded columns to the file in order while others are still being encoded. So the bytes of a file
//! depend only on the rows, not on the threads.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::thread;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, ListArray, RecordBatch};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, SchemaRef};
use crossbeam_channel::{Receiver, Sender};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::{
    ArrowColumnChunk, ArrowColumnWriter, ArrowRowGroupWriterFactory, compute_leaves,
};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;

/// Bytes of rows in a row group; at most this many are buffered, plus those of the last slice.
pub const ROW_GROUP_BYTES: usize = 32 << 20;

/// Bytes of rows that are encoded at once. The encoder uses about 16 more bytes for each of their values, for one
/// column per thread, and is fastest while these fit in the cache.
const PIECE_BYTES: usize = 1 << 20;

/// Row groups with fewer bytes of rows are encoded by the calling thread.
const SINGLE_THREAD_BYTES: usize = 1 << 20;

/// The writers of a field, one per leaf.
type Writers = Vec<ArrowColumnWriter>;
/// A field's position in the schema, and its encoded leaves.
type Encoded = (usize, Result<Vec<ArrowColumnChunk>>);

/// The rows of a file under construction.
pub(super) struct RowGroups {
    file: SerializedFileWriter<File>,
    factory: ArrowRowGroupWriterFactory,
    schema: SchemaRef,
    threads: usize,
    waiting: Vec<RecordBatch>,
    waiting_bytes: usize,
}

impl RowGroups {
    /// A file without rows; at most `threads` threads encode its columns.
    pub fn new(
        file: File,
        schema: SchemaRef,
        properties: WriterProperties,
        threads: usize,
    ) -> Result<RowGroups> {
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties))?;
        let (file, factory) = writer.into_serialized_writer()?;
        Ok(RowGroups {
            file,
            factory,
            schema,
            threads: threads.max(1),
            waiting: Vec::new(),
            waiting_bytes: 0,
        })
    }

    /// Adds rows with the file's schema.
    pub fn add(&mut self, rows: &RecordBatch) -> Result<()> {
        let count = rows.num_rows();
        if count == 0 {
            return Ok(());
        }
        let bytes: usize = rows.columns().iter().map(bytes_of).sum();
        let at_once = (count * PIECE_BYTES / bytes.max(1)).clamp(1, count);
        for start in (0..count).step_by(at_once) {
            let len = at_once.min(count - start);
            self.waiting.push(rows.slice(start, len));
            self.waiting_bytes += (bytes / count) * len;
            if self.waiting_bytes >= ROW_GROUP_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Writes the buffered rows as a row group.
    pub fn flush(&mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.waiting);
        let bytes = std::mem::take(&mut self.waiting_bytes);
        if rows.is_empty() {
            return Ok(());
        }
        let index = self.file.flushed_row_groups().len();
        let leaves = self.factory.create_column_writers(index)?;
        let mut columns: Vec<Writers> = self.schema.fields().iter().map(|_| Vec::new()).collect();
        for (leaf, writer) in leaves.into_iter().enumerate() {
            columns[self.file.schema_descr().get_column_root_idx(leaf)].push(writer);
        }
        let threads = match bytes {
            ..SINGLE_THREAD_BYTES => 1,
            _ => self.threads.min(columns.len()),
        };
        let schema = self.schema.clone();
        let encode = |at: usize, writers| encode(schema.field(at), at, &rows, writers);
        let mut group = self.file.next_row_group()?;
        let mut append = |chunks: Vec<ArrowColumnChunk>| {
            let mut chunks = chunks.into_iter();
            chunks.try_for_each(|chunk| chunk.append_to_row_group(&mut group))
        };
        if threads == 1 {
            let mut columns = columns.into_iter().enumerate();
            columns.try_for_each(|(at, writers)| append(encode(at, writers)?))?;
        } else {
            encode_together(columns, threads, &encode, &mut append)?;
        }
        group.close().map(drop)
    }

    /// Bytes in the file.
    pub fn bytes_written(&self) -> usize {
        self.file.bytes_written()
    }

    /// Writes the buffered rows and completes the file; returns its size.
    pub fn close(mut self, about: KeyValue) -> Result<usize> {
        self.flush()?;
        self.file.append_key_value_metadata(about);
        self.file.finish()?;
        Ok(self.file.bytes_written())
    }
}

/// Encodes columns in several threads, and passes them to `append` in order as soon as they are ready.
fn encode_together(
    columns: Vec<Writers>,
    threads: usize,
    encode: &(impl Fn(usize, Writers) -> Result<Vec<ArrowColumnChunk>> + Sync),
    append: &mut impl FnMut(Vec<ArrowColumnChunk>) -> Result<()>,
) -> Result<()> {
    let (queue, jobs) = crossbeam_channel::unbounded();
    for job in columns.into_iter().enumerate() {
        // Cannot fail, since `jobs` is the receiver.
        let _ = queue.send(job);
    }
    drop(queue);
    let (results, encoded) = crossbeam_channel::unbounded();
    thread::scope(|scope| {
        for _ in 0..threads {
            let (jobs, results): (Receiver<(usize, Writers)>, Sender<Encoded>) =
                (jobs.clone(), results.clone());
            let work = move || {
                for (at, writers) in jobs {
                    if results.send((at, encode(at, writers))).is_err() {
                        // An error ended the row group.
                        break;
                    }
                }
            };
            thread::Builder::new()
                .name("trace-columns".to_owned())
                .spawn_scoped(scope, work)
                .map_err(|e| ParquetError::External(Box::new(e)))?;
        }
        drop(results);
        let (mut early, mut next) = (BTreeMap::new(), 0);
        for (at, chunks) in encoded {
            early.insert(at, chunks?);
            while let Some(chunks) = early.remove(&next) {
                append(chunks)?;
                next += 1;
            }
        }
        Ok(())
    })
}

/// Encodes a column of a row group.
fn encode(
    field: &Field,
    at: usize,
    rows: &[RecordBatch],
    mut writers: Writers,
) -> Result<Vec<ArrowColumnChunk>> {
    for rows in rows {
        let leaves = compute_leaves(field, &own_items(rows.column(at)))?;
        for (writer, leaf) in writers.iter_mut().zip(&leaves) {
            writer.write(leaf)?;
        }
    }
    writers.into_iter().map(ArrowColumnWriter::close).collect()
}

/// A list array without the items of rows outside of it. The encoder converts all items of an array, even those that
/// its rows do not use: for every slice those of the entire step.
fn own_items(array: &ArrayRef) -> ArrayRef {
    let (DataType::List(item), Some(list)) = (array.data_type(), array.as_list_opt::<i32>()) else {
        return array.clone();
    };
    let first = list.value_offsets()[0];
    let items: usize = list.offsets().lengths().sum();
    let items = own_items(&list.values().slice(first as usize, items));
    let offsets = OffsetBuffer::from_lengths(list.offsets().lengths());
    Arc::new(ListArray::new(
        item.clone(),
        offsets,
        items,
        list.nulls().cloned(),
    ))
}

/// Bytes of an array's own rows; it may share its buffers with others.
fn bytes_of(array: &ArrayRef) -> usize {
    let own = own_items(array).to_data().get_slice_memory_size();
    own.unwrap_or_else(|_| array.get_buffer_memory_size())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use arrow_array::types::UInt8Type;
    use arrow_array::{Float32Array, StringArray};
    use arrow_schema::Schema;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use super::*;

    fn lists(rows: usize, items: usize) -> ArrayRef {
        let row = |row: usize| match row % 7 {
            3 => None,
            _ => Some((0..items).map(move |item| Some(((row * 31 + item * 7) % 251) as u8))),
        };
        Arc::new(ListArray::from_iter_primitive::<UInt8Type, _, _>(
            (0..rows).map(row),
        ))
    }

    fn rows(count: usize, items: usize) -> RecordBatch {
        let numbers = (0..count).map(|row| (row % 5 > 0).then_some(row as f32));
        let texts = (0..count).map(|row| "x".repeat(row % 13));
        let columns: [(&str, ArrayRef, bool); 3] = [
            ("kinds", lists(count, items), true),
            ("numbers", Arc::new(Float32Array::from_iter(numbers)), true),
            (
                "texts",
                Arc::new(StringArray::from_iter_values(texts)),
                false,
            ),
        ];
        RecordBatch::try_from_iter_with_nullable(columns).expect("a record")
    }

    fn written(path: &Path, rows: &RecordBatch, slice: usize, threads: usize) -> Vec<u8> {
        let file = File::create(path).expect("creates");
        let properties = WriterProperties::default();
        let groups = RowGroups::new(file, rows.schema(), properties, threads);
        let mut groups = groups.expect("a file");
        for start in (0..rows.num_rows()).step_by(slice) {
            let len = slice.min(rows.num_rows() - start);
            groups.add(&rows.slice(start, len)).expect("writes");
        }
        let about = KeyValue::new("about".to_owned(), "this".to_owned());
        let size = groups.close(about).expect("ends");
        let bytes = std::fs::read(path).expect("reads");
        assert_eq!(size, bytes.len());
        bytes
    }

    #[test]
    fn the_bytes_of_a_file_do_not_depend_on_the_threads() {
        let temp = tempfile::tempdir().expect("a folder");
        let path = temp.path().join("file.parquet");
        // More than a row group.
        let rows = rows(5000, 9000);
        let one = written(&path, &rows, 700, 1);
        for threads in [2, 3, 16] {
            assert!(
                written(&path, &rows, 700, threads) == one,
                "{threads} threads"
            );
        }
        let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(&path).expect("opens"))
            .expect("a file");
        let about = builder.metadata().clone();
        assert_eq!(about.num_row_groups(), 2);
        let reader = builder
            .with_batch_size(rows.num_rows())
            .build()
            .expect("a reader");
        let pieces: Vec<RecordBatch> = reader
            .collect::<std::result::Result<_, _>>()
            .expect("reads");
        assert_eq!(pieces, [rows]);
    }

    #[test]
    fn a_slice_of_a_list_has_only_its_own_items() {
        let whole = lists(20, 100);
        let some = whole.slice(5, 4);
        let own = own_items(&some);
        assert_eq!(&own, &some);
        assert_eq!(own.as_list::<i32>().values().len(), 400);
        // Five offsets of 4 bytes, 400 items of 1, a byte of which rows are null.
        let bytes = bytes_of(&some);
        assert!((420..=440).contains(&bytes), "{bytes}");
        assert_eq!(&own_items(&whole.slice(3, 0)), &whole.slice(3, 0));
    }

    #[test]
    fn an_error_in_a_thread_fails_the_row_group() {
        let columns = (0..4).map(|_| Vec::new()).collect();
        let encode = |at: usize, _: Writers| match at {
            2 => Err(ParquetError::General("column 2".to_owned())),
            _ => Ok(Vec::new()),
        };
        let mut appended = 0;
        let mut append = |_: Vec<ArrowColumnChunk>| {
            appended += 1;
            Ok(())
        };
        let error = encode_together(columns, 2, &encode, &mut append).expect_err("column 2");
        assert!(error.to_string().contains("column 2"), "{error}");
        assert!(appended <= 2);
    }

    #[test]
    fn a_file_without_rows_is_valid() {
        let temp = tempfile::tempdir().expect("a folder");
        let path = temp.path().join("file.parquet");
        let none = RecordBatch::new_empty(Arc::new(Schema::new(vec![Field::new(
            "numbers",
            DataType::Float32,
            true,
        )])));
        written(&path, &none, 1, 4);
        let file = File::open(&path).expect("opens");
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).expect("a file");
        assert_eq!(builder.metadata().file_metadata().num_rows(), 0);
    }
}
