package sim

// ring is a queue that grows and keeps its memory.
type ring[T any] struct {
	items []T // len is a power of two, or 0
	head  int
	count int
}

func (r *ring[T]) len() int { return r.count }

// at is the i-th from the front.
func (r *ring[T]) at(i int) *T { return &r.items[(r.head+i)&(len(r.items)-1)] }

func (r *ring[T]) push(x T) {
	if r.count == len(r.items) {
		grown := make([]T, max(8, 2*len(r.items)))
		for i := range r.count {
			grown[i] = *r.at(i)
		}
		r.items, r.head = grown, 0
	}
	r.count++
	*r.at(r.count - 1) = x
}

func (r *ring[T]) pop() T {
	var zero T
	x := *r.at(0)
	*r.at(0) = zero
	r.head = (r.head + 1) & (len(r.items) - 1)
	r.count--
	return x
}

// popBack removes the last one.
func (r *ring[T]) popBack() T {
	var zero T
	p := r.at(r.count - 1)
	x := *p
	*p = zero
	r.count--
	return x
}
