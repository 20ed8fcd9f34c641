//! Rows of different lengths in one flat buffer.

use crate::error::{AlgoError, check_len};

/// Ragged rows: values and offsets; row b is `values[offsets[b]..offsets[b + 1]]`.
///
/// # Example
/// ```
/// use verl_algos::Ragged;
/// let rewards = Ragged::<f64>::from_rows([vec![0.0f32, 1.0], vec![], vec![0.5]]);
/// assert_eq!(rewards.num_rows(), 3);
/// assert_eq!(rewards.row(0), &[0.0, 1.0]);
/// assert_eq!(rewards.row_of_each(), vec![0, 0, 2]);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Ragged<T> {
    values: Vec<T>,
    offsets: Vec<usize>,
}

impl<T: Copy> Ragged<T> {
    /// Copies rows of any type that converts losslessly, such as f32 to f64.
    pub fn from_rows<R, S>(rows: impl IntoIterator<Item = R>) -> Ragged<T>
    where
        R: AsRef<[S]>,
        S: Copy + Into<T>,
    {
        let mut out = Ragged {
            values: Vec::new(),
            offsets: vec![0],
        };
        for row in rows {
            out.push(row.as_ref().iter().map(|&v| v.into()));
        }
        out
    }

    /// Rows with the same lengths as `self`, each value computed from (row, token, value).
    pub fn map<U>(&self, mut f: impl FnMut(usize, usize, T) -> U) -> Ragged<U> {
        let mut values = Vec::with_capacity(self.values.len());
        for b in 0..self.num_rows() {
            for (t, &v) in self.row(b).iter().enumerate() {
                values.push(f(b, t, v));
            }
        }
        Ragged {
            values,
            offsets: self.offsets.clone(),
        }
    }

    fn push(&mut self, row: impl Iterator<Item = T>) {
        self.values.extend(row);
        self.offsets.push(self.values.len());
    }

    /// Number of rows, `B`.
    pub fn num_rows(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Number of values in all rows.
    pub fn num_values(&self) -> usize {
        self.values.len()
    }

    /// Row `b`.
    ///
    /// # Panics
    /// If `b` is not below [`Ragged::num_rows`].
    pub fn row(&self, b: usize) -> &[T] {
        &self.values[self.offsets[b]..self.offsets[b + 1]]
    }

    /// All rows in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[T]> {
        (0..self.num_rows()).map(|b| self.row(b))
    }

    /// All values, row after row.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Row of each value.
    pub fn row_of_each(&self) -> Vec<usize> {
        (0..self.num_rows())
            .flat_map(|b| std::iter::repeat_n(b, self.row(b).len()))
            .collect()
    }

    /// The values where `mask` is true, row after row: from ragged to packed.
    ///
    /// # Errors
    /// Rows whose lengths differ from those of `mask`; the error names `argument`.
    pub fn select(&self, argument: &'static str, mask: &Ragged<bool>) -> Result<Vec<T>, AlgoError> {
        self.check_like(argument, mask)?;
        let kept = self.values.iter().zip(&mask.values);
        Ok(kept.filter(|(_, m)| **m).map(|(v, _)| *v).collect())
    }

    /// Rejects rows whose lengths differ from those of `other`.
    ///
    /// # Errors
    /// [`AlgoError::Shape`] or [`AlgoError::RowLength`], which name `argument`.
    pub fn check_like<U>(
        &self,
        argument: &'static str,
        other: &Ragged<U>,
    ) -> Result<(), AlgoError> {
        check_len(argument, "rows", self.num_rows(), other.offsets.len() - 1)?;
        for row in 0..self.num_rows() {
            let got = self.offsets[row + 1] - self.offsets[row];
            let expected = other.offsets[row + 1] - other.offsets[row];
            if got != expected {
                return Err(AlgoError::RowLength {
                    argument,
                    row,
                    got,
                    expected,
                });
            }
        }
        Ok(())
    }
}

impl Ragged<bool> {
    /// Number of true values of each row: L_b if this is a mask of action tokens.
    pub fn counts(&self) -> Vec<usize> {
        self.rows()
            .map(|row| row.iter().filter(|m| **m).count())
            .collect()
    }

    /// Row of each true value: the row index of packed tokens.
    pub fn packed_rows(&self) -> Vec<usize> {
        let counts = self.counts();
        let each = counts.iter().enumerate();
        each.flat_map(|(b, &n)| std::iter::repeat_n(b, n)).collect()
    }

    /// Repeats one number per row on the row's action tokens; 0 at observations.
    ///
    /// # Errors
    /// Different numbers of values and rows.
    pub fn broadcast(&self, values: &[f64]) -> Result<Ragged<f64>, AlgoError> {
        check_len("values", "rows", values.len(), self.num_rows())?;
        Ok(self.map(|b, _, action| if action { values[b] } else { 0.0 }))
    }

    /// Scatters packed numbers back to the action tokens; 0 at observations.
    ///
    /// # Errors
    /// Different numbers of values and action tokens.
    pub fn scatter(&self, packed: &[f64]) -> Result<Ragged<f64>, AlgoError> {
        let actions = self.values.iter().filter(|m| **m).count();
        check_len("packed", "tokens", packed.len(), actions)?;
        let mut next = packed.iter();
        Ok(self.map(|_, _, action| {
            let value = if action { next.next() } else { None };
            value.copied().unwrap_or(0.0)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_and_scatters_around_observations() {
        let mask = Ragged::<bool>::from_rows([vec![true, false, true], vec![], vec![false, true]]);
        let values =
            Ragged::<f64>::from_rows([vec![1.0, f64::NAN, 2.0], vec![], vec![f64::NAN, 3.0]]);
        let packed = values.select("values", &mask).unwrap();
        assert_eq!(packed, [1.0, 2.0, 3.0]);
        assert_eq!(mask.packed_rows(), [0, 0, 2]);
        let back = mask.scatter(&packed).unwrap();
        assert_eq!(back.values(), [1.0, 0.0, 2.0, 0.0, 3.0]);
        let rows = mask.broadcast(&[7.0, 8.0, 9.0]).unwrap();
        assert_eq!(rows.values(), [7.0, 0.0, 7.0, 0.0, 9.0]);
    }

    #[test]
    fn rejects_rows_of_the_wrong_length() {
        let mask = Ragged::<bool>::from_rows([vec![true], vec![true, true]]);
        let short = Ragged::<f64>::from_rows([vec![1.0], vec![1.0]]);
        let error = short.select("values", &mask).unwrap_err();
        assert_eq!(
            error.to_string(),
            "row 1 of `values` has 1 tokens, expected 2"
        );
        assert!(mask.broadcast(&[1.0]).is_err());
        assert!(mask.scatter(&[1.0]).is_err());
    }
}
