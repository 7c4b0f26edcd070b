//! A host that only records its orders.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::future::BoxFuture;

use super::{Answer, Host, HostError, HostView, Order, Progress, Refusal};

type Script = Box<dyn FnMut(&Order) -> Result<Answer, Refusal> + Send>;

/// Records orders and answers them from a script.
pub struct FakeHost {
    orders: Mutex<Vec<Order>>,
    script: Mutex<Script>,
}

impl FakeHost {
    /// A host that answers with `script`.
    pub fn new(script: impl FnMut(&Order) -> Result<Answer, Refusal> + Send + 'static) -> Self {
        Self { orders: Mutex::default(), script: Mutex::new(Box::new(script)) }
    }

    /// A host that gives these answers, one after the other, and then refuses.
    pub fn answering(answers: impl IntoIterator<Item = Result<Answer, Refusal>>) -> Self {
        let mut answers: VecDeque<_> = answers.into_iter().collect();
        Self::new(move |order| {
            answers.pop_front().unwrap_or_else(|| Err(Refusal::new(format!("no answer is left for {order:?}"))))
        })
    }

    /// A host without any state, on which every order that is answered with [`Answer::Done`] succeeds.
    pub fn blank() -> Self {
        Self::new(|order| match order {
            Order::Observe => Ok(Answer::Observed(Box::<HostView>::default())),
            Order::Claim(_) | Order::Configure(_) | Order::Remove(_) => Ok(Answer::Done),
            other => Err(Refusal::new(format!("a blank host has no answer to {other:?}"))),
        })
    }

    /// All orders up to now, oldest first.
    pub fn orders(&self) -> Vec<Order> {
        guard(&self.orders).clone()
    }

    /// The orders since the last call.
    pub fn take_orders(&self) -> Vec<Order> {
        std::mem::take(&mut guard(&self.orders))
    }
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host for FakeHost {
    fn run<'a>(
        &'a self,
        order: Order,
        _progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>> {
        let answer = (*guard(&self.script))(&order);
        guard(&self.orders).push(order);
        Box::pin(async move { answer.map_err(HostError::Refused) })
    }

    /// A successful order ends after `coming`, a failed one at once.
    fn run_while<'a>(
        &'a self,
        order: Order,
        coming: BoxFuture<'a, ()>,
        progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>> {
        Box::pin(async move {
            let answer = self.run(order, progress).await?;
            coming.await;
            Ok(answer)
        })
    }

    /// No broker of a recorded host has a socket.
    fn broker_socket(&self) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn passwd(&self) -> io::Result<String> {
        Ok(String::new())
    }
}
