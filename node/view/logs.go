package view

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// logs answers with a container's log, and follows it.
func (s *server) logs(w http.ResponseWriter, r *http.Request) {
	p, err := s.find(r)
	var o *corev1.PodLogOptions
	if err == nil {
		o, err = logOptions(r.URL.Query())
	}
	if err == nil {
		err = chooseContainer(p, o)
	}
	if err != nil {
		fail(w, err)
		return
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	default:
		fail(w, apierrors.NewTooManyRequests("too many logs are being read", 1))
		return
	}
	out := &flusher{w: w, rc: http.NewResponseController(w)}
	err = s.Source.Logs(r.Context(), p.Namespace, p.Name, string(p.UID), o, out)
	switch {
	case err != nil && !out.begun:
		fail(w, err)
	case err != nil && r.Context().Err() == nil:
		panic(http.ErrAbortHandler) // cut, so that the reader sees it is incomplete
	}
}

// logOptions reads those of the API's request.
func logOptions(q url.Values) (*corev1.PodLogOptions, error) {
	o := &corev1.PodLogOptions{Container: q.Get("container")}
	var err error
	flag := func(name string, to *bool) {
		if v := q.Get(name); v != "" && err == nil {
			if *to, err = strconv.ParseBool(v); err != nil {
				err = apierrors.NewBadRequest(fmt.Sprintf("%s=%s: true or false is wanted", name, v))
			}
		}
	}
	number := func(name string, least int64, to **int64) {
		if v := q.Get(name); v != "" && err == nil {
			n, perr := strconv.ParseInt(v, 10, 64)
			if perr != nil || n < least {
				err = apierrors.NewBadRequest(fmt.Sprintf("%s=%s: a number from %d on is wanted", name, v, least))
			}
			*to = &n
		}
	}
	flag("follow", &o.Follow)
	flag("previous", &o.Previous)
	flag("timestamps", &o.Timestamps)
	number("tailLines", 0, &o.TailLines)
	number("sinceSeconds", 1, &o.SinceSeconds)
	number("limitBytes", 1, &o.LimitBytes)
	if v := q.Get("sinceTime"); v != "" && err == nil {
		t, perr := time.Parse(time.RFC3339, v)
		if perr != nil {
			err = apierrors.NewBadRequest("sinceTime=" + v + ": not RFC 3339")
		}
		at := metav1.NewTime(t)
		o.SinceTime = &at
	}
	return o, err
}

// chooseContainer fills in the only container, or says which there are, in
// the server's words.
func chooseContainer(p *corev1.Pod, o *corev1.PodLogOptions) error {
	if o.Container != "" {
		return nil // whether it exists is checked where it is read
	}
	if len(p.Spec.Containers) == 1 {
		o.Container = p.Spec.Containers[0].Name
		return nil
	}
	if name := p.Annotations["kubectl.kubernetes.io/default-container"]; name != "" {
		o.Container = name
		return nil
	}
	var names []string
	for i := range p.Spec.Containers {
		names = append(names, p.Spec.Containers[i].Name)
	}
	return apierrors.NewBadRequest(fmt.Sprintf("a container name must be specified for pod %s, choose one of: [%s]", p.Name, strings.Join(names, " ")))
}

// writeTimeout is how long a reader may take to make room.
const writeTimeout = 30 * time.Second

// flusher sends every write at once.
type flusher struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	begun bool
}

// Write implements io.Writer.
func (f *flusher) Write(p []byte) (int, error) {
	if !f.begun {
		f.begun = true
		f.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	}
	_ = f.rc.SetWriteDeadline(time.Now().Add(writeTimeout)) // not every writer knows deadlines
	n, err := f.w.Write(p)
	if err != nil {
		return n, err
	}
	return n, f.rc.Flush()
}
