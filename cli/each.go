package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/dunlin-project/dunlin/cli/client"
)

// attempts counts what came of the same deed for each of several objects: a
// refusal of one is reported and the others go on, as kubectl does.
type attempts struct {
	a      *app
	deed   string // "applied"
	total  int
	failed []error
}

func (a *app) each(deed string, total int) *attempts {
	return &attempts{a: a, deed: deed, total: total}
}

// note takes the outcome for the i-th object. It returns an error, which says
// what was not tried, only when going on makes no sense: no server answers,
// or the user has had enough.
func (t *attempts) note(ctx context.Context, i int, err error) error {
	if err == nil {
		return nil
	}
	var unreachable *client.UnreachableError
	if ctx.Err() != nil || errors.As(err, &unreachable) {
		if left := t.total - i - 1; left > 0 {
			err = fmt.Errorf("%w\n(the other %d of %d objects were not tried)", err, left, t.total)
		}
		return err
	}
	if t.failed = append(t.failed, err); t.total > 1 {
		t.a.notef("Error: %v\n", err)
	}
	return nil
}

// done is the command's error.
func (t *attempts) done() error {
	switch {
	case len(t.failed) == 0:
		return nil
	case t.total == 1:
		return t.failed[0]
	}
	return fmt.Errorf("%d of %d objects were not %s; the reasons stand above", len(t.failed), t.total, t.deed)
}
