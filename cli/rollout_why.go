package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

// rolloutLook is how often a rollout that waits is looked at without news of
// its object: what a pod waits for changes without a change of its owner.
const rolloutLook = 3 * time.Second

// waited is an object whose rollout is waited for.
type waited struct {
	a          *app
	c          *client.Client
	what, name string // "deployment", "hello"
	list, path string // of the collection, of the object
	// progress says where the rollout is, and selector whose pods to ask.
	progress func(raw []byte) (message string, done bool, err error)

	said string // the last line
	why  string // the last reasons
}

// wait prints each step until the rollout is complete, and while it is not,
// what its pods wait for.
func (w *waited) wait(ctx context.Context) error {
	for {
		var raw json.RawMessage
		if err := w.c.JSON(ctx, client.Request{Method: http.MethodGet, Path: w.path}, &raw); err != nil {
			return w.end(ctx, err)
		}
		more, err := w.check(raw)
		if err != nil || !more {
			return err
		}
		if err := w.reasons(ctx, raw); err != nil {
			return w.end(ctx, err)
		}
		done, err := w.follow(ctx, raw)
		if err != nil || done {
			return w.end(ctx, err)
		}
	}
}

// check takes one version of the object; more: it is not done.
func (w *waited) check(raw []byte) (more bool, err error) {
	msg, done, err := w.progress(raw)
	if err != nil {
		return false, err
	}
	if msg != w.said {
		w.a.printf("%s\n", msg)
		w.said, w.why = msg, ""
	}
	return !done, nil
}

// follow watches the object until it is done, for one look.
func (w *waited) follow(ctx context.Context, raw []byte) (done bool, err error) {
	var m metav1.PartialObjectMetadata
	if err := json.Unmarshal(raw, &m); err != nil {
		return false, fmt.Errorf("read %s: %w", w.name, err)
	}
	look, cancel := context.WithTimeout(ctx, rolloutLook)
	defer cancel()
	q := url.Values{"fieldSelector": {"metadata.name=" + w.name}, "resourceVersion": {m.ResourceVersion}}
	var failed error
	err = w.c.Watch(look, w.list, q, client.JSON, func(typ string, raw json.RawMessage) (bool, error) {
		more := false
		if typ == "DELETED" {
			failed = fmt.Errorf("%s %q was deleted", w.what, w.name)
		} else {
			more, failed = w.check(raw)
			done = failed == nil && !more
		}
		return more, failed
	})
	var refused *client.StatusError
	switch {
	case errors.As(err, &refused) && refused.Status.Code == http.StatusGone: // it is read again
		return false, nil
	case failed != nil || done:
		return done, failed
	case ctx.Err() != nil:
		return false, ctx.Err()
	case err == nil || errors.Is(err, io.EOF) || look.Err() != nil:
		return false, nil
	}
	return false, err
}

func (w *waited) end(ctx context.Context, err error) error {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return err
	}
	s := fmt.Sprintf("%s %q is not rolled out yet: %s", w.what, w.name, cmp.Or(w.said, "no server answered in that time"))
	if w.why != "" {
		s += "\n" + strings.TrimSuffix(w.why, "\n")
	}
	return errors.New(s)
}

// reasons prints what the pods wait for, when it is something new.
func (w *waited) reasons(ctx context.Context, raw []byte) error {
	var set struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
		Spec     struct {
			Selector *metav1.LabelSelector `json:"selector"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(raw, &set); err != nil {
		return fmt.Errorf("read %s: %w", w.name, err)
	}
	var pods corev1.PodList
	q := url.Values{"labelSelector": {metav1.FormatLabelSelector(set.Spec.Selector)}}
	r := client.Request{Method: http.MethodGet, Path: "/api/v1/namespaces/" + url.PathEscape(w.c.Namespace) + "/pods", Query: q}
	if err := w.c.JSON(ctx, r, &pods); err != nil {
		return err
	}
	if text := podReasons(pods.Items); text != w.why {
		w.a.printf("%s", text)
		w.why = text
	}
	return nil
}

// reasonsShown is how many different reasons are printed.
const reasonsShown = 3

// podReasons says for the pods that do not run what each waits for, the
// newest first. Pods with the same reason share a line. It holds no ages, so
// that the same state is the same text.
func podReasons(pods []corev1.Pod) string {
	slices.SortStableFunc(pods, func(x, y corev1.Pod) int {
		if c := y.CreationTimestamp.Compare(x.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(x.Name, y.Name)
	})
	type line struct {
		first  string
		others int
		why    why
	}
	var lines []line
	for i := range pods {
		p := &pods[i]
		w, ok := whyPod(p, false)
		if !ok {
			continue
		}
		j := slices.IndexFunc(lines, func(l line) bool { return l.why.reason == w.reason })
		if j >= 0 {
			lines[j].others++
			continue
		}
		lines = append(lines, line{first: p.Name, why: w})
	}
	var b strings.Builder
	for i, l := range lines {
		if i == reasonsShown {
			fmt.Fprintf(&b, "  and %d more\n", len(lines)-i)
			break
		}
		name := "pod " + l.first
		if l.others > 0 {
			name += fmt.Sprintf(" and %d like it", l.others)
		}
		fmt.Fprintf(&b, "  %s: %s\n    next: %s\n", name, l.why.reason, l.why.next)
	}
	return b.String()
}
