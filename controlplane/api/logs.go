package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/manifests"
)

// pod reads the pod that a sub-resource is about.
func (s *Server) pod(rq *request) (*corev1.Pod, error) {
	obj, err := s.read(rq, "")
	if err != nil {
		return nil, err
	}
	p, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("%T is no pod", obj))
	}
	return p, nil
}

// logs answers GET on log.
func (s *Server) logs(rq *request) error {
	if s.cfg.Logs == nil {
		return &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusNotImplemented, Reason: metav1.StatusReasonUnknown,
			Message: "this server cannot reach the nodes' logs",
		}}
	}
	p, err := s.pod(rq)
	if err != nil {
		return err
	}
	o := &corev1.PodLogOptions{}
	if err := manifests.ParameterCodec().DecodeParameters(rq.URL.Query(), corev1.SchemeGroupVersion, o); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if err := checkLogOptions(p, o); err != nil {
		return err
	}
	if s.cfg.Streams != nil && websocket.IsWebSocketUpgrade(rq.Request) {
		return s.cfg.Streams.ServeLogs(rq.w, rq.Request, func(ctx context.Context, w io.Writer) error {
			return s.cfg.Logs.Logs(ctx, p, o, w)
		})
	}
	w := &logWriter{w: rq.w, rc: http.NewResponseController(rq.w), deadline: s.cfg.WriteDeadline, header: func() {
		rq.writeWarnings()
		rq.w.Header().Set("Content-Type", "text/plain")
		rq.w.WriteHeader(http.StatusOK)
	}}
	if err := s.cfg.Logs.Logs(rq.Context(), p, o, w); err != nil {
		if rq.w.code == 0 {
			return err
		}
		if rq.Context().Err() == nil {
			s.cfg.Log.Debug("log stream ended early", "namespace", p.Namespace, "pod", p.Name, "err", err)
		}
		return nil
	}
	if rq.w.code == 0 {
		w.header()
	}
	return nil
}

func checkLogOptions(p *corev1.Pod, o *corev1.PodLogOptions) error {
	var errs field.ErrorList
	negative := func(name string, v *int64, least int64) {
		if v != nil && *v < least {
			errs = append(errs, field.Invalid(field.NewPath(name), *v, fmt.Sprintf("must be greater than or equal to %d", least)))
		}
	}
	negative("tailLines", o.TailLines, 0)
	negative("limitBytes", o.LimitBytes, 1)
	negative("sinceSeconds", o.SinceSeconds, 1)
	if o.SinceSeconds != nil && o.SinceTime != nil {
		errs = append(errs, field.Forbidden(field.NewPath(""), "at most one of `sinceTime` or `sinceSeconds` may be specified"))
	}
	if len(errs) > 0 {
		return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("PodLogOptions").GroupKind(), p.Name, errs)
	}
	return chooseContainer(p, o)
}

// chooseContainer fills in the only container, or says which there are.
func chooseContainer(p *corev1.Pod, o *corev1.PodLogOptions) error {
	var names, inits []string
	for _, c := range p.Spec.Containers {
		names = append(names, c.Name)
	}
	for _, c := range p.Spec.InitContainers {
		inits = append(inits, c.Name)
	}
	if o.Container == "" {
		switch {
		case len(names) == 1:
			o.Container = names[0]
			return nil
		case p.Annotations["kubectl.kubernetes.io/default-container"] != "":
			o.Container = p.Annotations["kubectl.kubernetes.io/default-container"]
			return nil
		case len(inits) > 0:
			return apierrors.NewBadRequest(fmt.Sprintf("a container name must be specified for pod %s, choose one of: %v or one of the init containers: %v", p.Name, names, inits))
		}
		return apierrors.NewBadRequest(fmt.Sprintf("a container name must be specified for pod %s, choose one of: %v", p.Name, names))
	}
	for _, n := range append(names, inits...) {
		if n == o.Container {
			return nil
		}
	}
	for _, c := range p.Spec.EphemeralContainers {
		if c.Name == o.Container {
			return nil
		}
	}
	return apierrors.NewBadRequest(fmt.Sprintf("container %s is not valid for pod %s", o.Container, p.Name))
}

// logWriter starts the answer with the first byte and flushes every write.
type logWriter struct {
	w        io.Writer
	rc       *http.ResponseController
	deadline time.Duration
	header   func()
	started  bool
}

func (l *logWriter) Write(b []byte) (int, error) {
	if !l.started {
		l.started = true
		l.header()
	}
	// Not every writer knows deadlines (tests' recorders do not).
	_ = l.rc.SetWriteDeadline(time.Now().Add(l.deadline))
	defer func() { _ = l.rc.SetWriteDeadline(time.Time{}) }() // HTTP/2 resets an idle stream whose deadline passes
	n, err := l.w.Write(b)
	if err != nil {
		return n, err
	}
	return n, l.rc.Flush()
}
